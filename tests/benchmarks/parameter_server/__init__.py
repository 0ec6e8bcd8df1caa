"""Parameter servers beside TensorFlow's: cases, figures, table; real servers with few rows."""

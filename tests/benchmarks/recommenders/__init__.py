"""Tables beside TorchRec and TensorFlow: cases, figures, table; real servers with few rows."""

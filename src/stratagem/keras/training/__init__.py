"""`fit`, `evaluate` and `predict` under a strategy: models, steps, and data."""

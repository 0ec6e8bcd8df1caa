"""Evaluation of checkpoints in another process during training."""

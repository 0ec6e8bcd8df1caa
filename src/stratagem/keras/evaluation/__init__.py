"""Evaluation of checkpoints in another process during training."""

__all__: list[str] = []

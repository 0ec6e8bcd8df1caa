"""Evaluation of checkpoints in another process, while training goes on."""

__all__: list[str] = []

"""Callbacks for users: backups of training, and TensorBoard."""

__all__: list[str] = []

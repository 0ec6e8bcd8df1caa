"""Keras callbacks: `BackupAndRestore` and `TensorBoard`."""

__all__: list[str] = []

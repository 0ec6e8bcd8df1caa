"""Keras callbacks: `BackupAndRestore` and `TensorBoard`."""

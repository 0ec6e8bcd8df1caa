"""Callbacks of `fit`, by kind."""

from __future__ import annotations

import tempfile
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras

__all__ = ["callback_arguments"]


class _CountBatches(keras.callbacks.Callback):
    """Reads the logs of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0
        self.loss = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        self.loss = logs["loss"]


def callback_arguments(kind: str) -> dict[str, Any]:
    """Returns arguments of `fit` for a kind of `WorkerOptions.callbacks`."""
    if kind == "batches":
        return {"callbacks": [_CountBatches()]}
    if kind == "usual":
        early = keras.callbacks.EarlyStopping("loss", patience=10**9)
        return {"verbose": 1, "callbacks": [early, sg.TensorBoard(tempfile.mkdtemp())]}
    assert not kind
    return {}

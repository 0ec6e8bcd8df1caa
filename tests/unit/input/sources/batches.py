"""A Keras PyDataset, and the batches of a reader as lists."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np


class Batches(keras.utils.PyDataset):
    """Batches of two, reordered after each epoch."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.calls: list[str] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return np.arange(2 * index, 2 * index + 2)

    def on_epoch_begin(self) -> None:
        self.calls.append("begin")

    def on_epoch_end(self) -> None:
        self.calls.append("end")


def values_of(batches: Any) -> list[Any]:
    return [
        [leaf.tolist() for leaf in (batch if isinstance(batch, tuple) else (batch,))]
        for batch in batches
    ]

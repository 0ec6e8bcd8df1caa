"""Lengths that processes compare at the start of `fit`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.keras.training.data_lengths import data_lengths, require_equal_lengths
from stratagem.keras.training.dataset_adapter import DatasetAdapter

LABELS = ("worker 0 (a:1)", "worker 1 (b:1)")


class _OfUnknownLength:
    def __len__(self) -> int:
        raise TypeError("unknown")


def _batches() -> DatasetAdapter:
    strategy = sg.MirroredStrategy(["cpu:0"])
    return DatasetAdapter(strategy.distribute_dataset([np.ones((2, 3))] * 5))


@pytest.mark.parametrize(
    ("data", "length"),
    [
        (np.ones((7, 2)), 7),
        ({"a": np.ones((6,)), "b": np.ones((6, 1))}, 6),
        (([np.ones((5, 2))], np.ones((5,))), 5),
        ([1.0, 2.0, 3.0], 3),
        (_batches, 5),
        (_OfUnknownLength(), None),
        (iter([]), None),
        (np.float32(1.0), None),
        (None, None),
    ],
)
def test_length_is_that_of_arrays_or_of_batches(data: Any, length: int | None) -> None:
    data = data() if callable(data) else data
    known = {} if length is None else {"the length of x": length}
    assert data_lengths({"x": data, "epochs": 3, "steps_per_epoch": None}) == {"epochs": 3} | known


def test_equal_and_unknown_lengths_pass() -> None:
    require_equal_lengths([{"epochs": 3, "steps": 2}, {"epochs": 3}], LABELS)


def test_error_names_the_length_on_each_worker() -> None:
    words = r"length of x: 64 on worker 0 \(a:1\), 80 on worker 1 \(b:1\)\.(?s:.)*AutoShardPolicy"
    with pytest.raises(ValueError, match=words):
        require_equal_lengths([{"the length of x": 64}, {"the length of x": 80}], LABELS)

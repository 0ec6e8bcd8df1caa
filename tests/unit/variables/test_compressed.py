"""Choice of the variables whose gradients are sent compressed."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.store import is_compressed

INT8 = sg.compression.Int8()


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 64), "float32", True),
        ((64, 64), "bfloat16", True),
        ((3, 3, 16, 32), "float32", True),
        ((64, 64), "int32", False),
        ((4096,), "float32", False),
        ((8, 8), "float32", False),
    ],
)
def test_large_float_matrices_are_compressed(shape, dtype, expected) -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        variable = sg.Variable(np.zeros(shape), dtype=dtype)
    assert is_compressed(variable, INT8) is expected
    assert not is_compressed(variable, None)


def test_variables_on_servers_or_in_shards_are_not() -> None:
    with sg.CentralStorageStrategy(["cpu:0", "cpu:1"]).scope():
        variable = sg.Variable(np.zeros((64, 64), "float32"))
    assert not is_compressed(variable, INT8)


def test_tables_that_are_sent_as_rows_are_not() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        table = keras.layers.Embedding(70_000, 2)
        table.build()
    assert not is_compressed(table.embeddings, INT8)

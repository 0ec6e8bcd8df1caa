"""Keys: the same bits as the ids, and TensorFlow's fingerprints of strings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stratagem as sg

# Of FarmHash 1.1 (pyfarmhash 0.5.1, fingerprint64).
FINGERPRINTS = {"a": 12917804110809363939, "blue": 10660015788068286345}
EXTREMES = [-(2**63), -1, 0, 1, 2**31, 2**32, 2**63 - 1]


def numbers(keys: np.ndarray) -> list[Any]:
    """The keys as Python computes them from their halves."""
    assert (keys.dtype, keys.shape[-1]) == (np.uint32, 2)
    halves = keys.reshape(-1, 2).tolist()
    return [low + (high << 32) for low, high in halves]


def test_integers_are_their_own_keys() -> None:
    keys = sg.embedding.keys(np.array(EXTREMES))
    assert numbers(keys) == [value % 2**64 for value in EXTREMES]
    assert sg.embedding.keys(np.array([EXTREMES])).shape == (1, 7, 2)


@pytest.mark.parametrize("dtype", ["int8", "int32", "uint16", "uint64", ">i8"])
def test_integers_of_every_dtype(dtype) -> None:
    largest = int(np.iinfo(np.dtype(dtype).newbyteorder("=")).max)
    assert numbers(sg.embedding.keys(np.array([0, 5, largest], dtype))) == [0, 5, largest]


def test_small_negative_integers_are_those_of_64_bits() -> None:
    assert numbers(sg.embedding.keys(np.array([-1], "int8"))) == [2**64 - 1]


@pytest.mark.parametrize("dtype", ["U", "S", "O"])
def test_strings_have_the_fingerprints_of_tensorflow(dtype) -> None:
    keys = sg.embedding.keys(np.array([["a", "blue", ""]], dtype))
    assert keys.shape == (1, 3, 2)
    assert numbers(keys) == [FINGERPRINTS["a"], FINGERPRINTS["blue"], 0]


def test_one_key_and_none() -> None:
    assert numbers(sg.embedding.keys(7)) == [7]
    assert sg.embedding.keys(7).shape == (2,)
    assert sg.embedding.keys([]).shape == (0, 2)
    assert sg.embedding.keys(np.empty((3, 0), "S4")).shape == (3, 0, 2)


def test_part_of_an_array() -> None:
    values = np.arange(12).reshape(3, 4)[::2, 1:3]
    assert numbers(sg.embedding.keys(values)) == [1, 2, 9, 10]


@pytest.mark.parametrize(
    ("values", "received"),
    [([1.5], "dtype float64"), ([True], "dtype bool"), ([["a"], [None]], "type NoneType")],
)
def test_other_values_are_refused_without_their_value(values, received) -> None:
    with pytest.raises(TypeError, match=rf"sg.embedding.keys received .*{received}") as raised:
        sg.embedding.keys(np.array(values))
    assert "1.5" not in str(raised.value)

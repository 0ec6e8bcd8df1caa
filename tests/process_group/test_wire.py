"""Encoding of values between processes."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from stratagem.process_group.wire import decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        2.5,
        "text: {}",
        b"\x00\xff",
        [],
        [1, [2, "a"]],
        (1, (2, None)),
        {"a": (1,), "tuple": [2], "bytes": b"x"},
    ],
)
def test_values_come_back_as_they_were(value) -> None:
    text = json.dumps(encode(value))
    back = decode(json.loads(text))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="int32").reshape(2, 3),
        np.zeros((0, 4), "float16"),
        np.array(2.5),
        np.array([True, False]),
        np.array([1.5, -2.0], ml_dtypes.bfloat16),
        np.arange(6.0).reshape(2, 3).T,
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_with_their_shape_and_dtype(array) -> None:
    back = decode(json.loads(json.dumps(encode({"a": array}))))["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    back[...] = 1  # it is a copy of one's own


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, np.array(["a"]), len])
def test_values_that_need_pickling_are_rejected(value) -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to other processes(?s:.)*pickled"):
        encode(value)

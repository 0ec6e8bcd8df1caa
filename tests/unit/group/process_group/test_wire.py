"""Encoding of values between processes."""

from __future__ import annotations

import contextlib
import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.group.wire import decode, encode
from tests.fuzzing import JSON, fuzz


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
        np.array([["a", "b\0c"], ["", "é"]]),
        np.array([b"\x00\xff", b"x"]),
        np.zeros((0, 2), "U3"),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_arrays_come_back_with_their_shape_and_dtype(array) -> None:
    back = decode(json.loads(json.dumps(encode({"a": array}))))["a"]
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    back[...] = 1  # it is a copy of one's own


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, np.array(["a"], object), len])
def test_values_that_need_pickling_are_rejected(value) -> None:
    with pytest.raises(TypeError, match=r"cannot be sent to other processes(?s:.)*pickled"):
        encode(value)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"tuple": 3},
        {"bytes": "a"},
        {"array": ["object", [1], "AAAAAAAAAAA="]},
        {"array": ["V8", [1], "AAAAAAAAAAA="]},
        {"array": ["int32", [2**70], ""]},
        {"array": ["int32", [3], "AAAA"]},
        {"strings": ["int32", [1], ["1"]]},
        {"strings": ["<U1", [2], ["a"]]},
        {"strings": ["<U99999999", [1], ["a"]]},
        {"strings": ["<U1,int32", [1], ["a"]]},
        {"dict": []},
        {"a": 1, "b": 2},
    ],
    ids=str,
)
def test_what_no_process_encodes_is_a_value_error(value) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - from several libraries
        decode(value)


@pytest.mark.parametrize("dtype", [",bstey ", "i4,(", "i4,i4", "O", "V8", "U4", "", "int32\n", 3])
def test_only_names_of_numeric_types_are_decoded(dtype) -> None:
    with pytest.raises(ValueError, match="no encoded value"):
        decode({"array": [dtype, [0], ""]})


def test_deep_nesting_is_a_value_error() -> None:
    value: list[object] = []
    for _ in range(10_000):
        value = [value]
    with pytest.raises(ValueError, match="no encoded value"):
        decode(value)


_ENCODED = st.builds(
    lambda kind, content: {kind: content},
    st.sampled_from(["tuple", "bytes", "array", "dict"]),
    JSON | st.tuples(st.sampled_from(["int8", "float64", "O", "U3"]), JSON, st.just("AAAA")),
)


@fuzz
@given(st.lists(st.one_of(JSON, _ENCODED, st.lists(_ENCODED, max_size=3)), max_size=20))
def test_any_json_is_a_value_or_a_value_error(values) -> None:
    for value in values:
        with contextlib.suppress(ValueError):
            decode(value)

"""Batches as messages: bit for bit through the bytes of a message, and nothing is pickled."""

from __future__ import annotations

import collections
import sys
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stratagem.group.transport.wire import Message, pack, unpack
from stratagem.input.batch_messages import (
    checked_compression,
    compressed,
    decompressed,
    pack_batch,
    unpack_batch,
)
from stratagem.input.batches import SparseRows

Pair = collections.namedtuple("Pair", ["x", "y"])


def _through(batch: Any) -> Any:
    message = pack_batch(batch)
    return unpack_batch(unpack([bytes(frame) for frame in pack(message)]))


def _same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            _same(found[key], expected[key])
    elif isinstance(expected, tuple | list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            _same(one, other)
    elif isinstance(expected, np.ndarray) and expected.dtype == object:
        assert found.dtype == object
        assert found.shape == expected.shape
        _same(found.reshape(-1).tolist(), expected.reshape(-1).tolist())
    elif isinstance(expected, np.ndarray | np.generic):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()
    else:
        assert repr(found) == repr(expected)


_DTYPES = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(endianness="?"),
    hnp.floating_dtypes(endianness="?", sizes=(16, 32, 64)),
    hnp.complex_number_dtypes(endianness="?"),
    hnp.unicode_string_dtypes(endianness="?"),
    hnp.byte_string_dtypes(),
    hnp.datetime64_dtypes(),
    hnp.timedelta64_dtypes(),
)
_ARRAYS = _DTYPES.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
_TEXTS = st.lists(st.one_of(st.none(), st.binary(), st.text())).map(lambda values: _objects(values))
_LEAVES = st.one_of(
    _ARRAYS, _TEXTS, st.none(), st.integers(), st.booleans(), st.floats(), st.binary(),
    st.text(st.characters(codec="utf-8")),
)  # fmt: skip
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=6,
)


def _objects(values: list[Any]) -> np.ndarray:
    array = np.empty(len(values), object)
    array[:] = values
    return array


@pytest.mark.slow
@given(_TREES)
def test_any_batch_comes_out_as_it_went_in(batch) -> None:
    _same(_through(batch), batch)


def test_other_dtypes_orders_and_sizes() -> None:
    large = np.random.default_rng(0).integers(0, 255, (40, 2**20), np.uint8)
    batch = {
        "bfloat16": np.arange(5).astype(ml_dtypes.bfloat16),
        "int4": np.arange(5).astype(ml_dtypes.int4),
        "scalar": np.float16(2),
        "text": np.str_("é"),
        "large": large,
        "objects": _objects(["a\udc80", b"\xff", None, ""]).reshape(2, 2),
    }
    _same(_through(batch), batch)
    assert np.shares_memory(pack_batch((large,)).arrays[0], large)  # arrays are not copied
    fortran = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    np.testing.assert_array_equal(_through(fortran)[:, ::2], fortran[:, ::2])
    np.testing.assert_array_equal(_through(jnp.arange(3)), np.arange(3))
    rows = _through({"x": scipy.sparse.csr_matrix([[0.0, 2.0], [3.0, 0.0]])})["x"]
    assert isinstance(rows, SparseRows)  # of equal width
    assert rows.shape == (2,)
    np.testing.assert_array_equal(np.asarray(rows.values)[:, 0], [2.0, 3.0])


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({1, 2}, "a value of type set"),
        ({(1, 2): np.arange(2)}, "a dict with a key of type tuple"),
        (np.array([{}, {}]), "an array of objects of type dict"),
        (np.zeros(2, [("a", "i4")]), "an array of dtype"),
    ],
)
def test_other_values_are_refused(batch, words) -> None:
    with pytest.raises(TypeError, match=words):
        pack_batch(batch)


@pytest.mark.parametrize(
    "structure", [["named", [], "os", "system"], ["named", [], "os", "PathLike"], ["code"]]
)
def test_damaged_messages_call_nothing(structure) -> None:
    with pytest.raises(ConnectionError, match="received an invalid batch"):
        unpack_batch(Message("batch", {"structure": structure}))


# Compressed batches: bit for bit, smaller where they can be, and harmless if damaged.

_RANDOM = np.random.default_rng(0)
_TREE: dict[str, Any] = {
    "zeros": np.zeros((100, 1000), np.float32),
    "image": (np.arange(40_000_000, dtype=np.uint32) // 4096).astype(np.uint8).reshape(-1, 1000),
    "noise": _RANDOM.integers(0, 256, 100_000, np.uint8),
    "bf16": np.tile(np.arange(16).astype(ml_dtypes.bfloat16), 1000),
    "fortran": np.asfortranarray(np.ones((64, 64), np.int64)),
    "small": np.arange(3),
    "empty": np.zeros((0, 5), np.float64),
    "number": np.array(7, np.int16),
    "text": np.array(["same words"] * 5000),
    "objects": np.array(["same words", b"bytes", None] * 2000, object),
}


def test_batches_come_out_as_they_went_in() -> None:
    pytest.importorskip("zstandard")
    message = pack_batch(_TREE, is_compressed=True)
    plain = pack_batch(_TREE)
    assert sum(one.nbytes for one in message.arrays) < sum(one.nbytes for one in plain.arrays) / 20
    found = unpack_batch(unpack([bytes(frame) for frame in pack(message)]))
    _same(found, _TREE)


def test_arrays_that_do_not_shrink_stay_as_they_are() -> None:
    pytest.importorskip("zstandard")
    message = Message("batch", {}, [_TREE["noise"], _TREE["small"], _TREE["zeros"]])
    small = compressed(message)
    assert small.arrays[0] is _TREE["noise"]
    assert small.arrays[1] is _TREE["small"]
    assert small.fields == {"compressed": [None, None, ["float32", [100, 1000]]]}
    assert decompressed(message) is message


@pytest.mark.parametrize(
    "originals",
    [
        [["float32", [100, 1001]]],
        [["float32", [-1, 1000]]],
        [["O", [100, 1000]]],
        [["float32", 100]],
        [],
        [None, None],
        7,
        [["uint8", [2**60]]],
    ],
)
def test_damaged_descriptions_and_bytes_are_refused(originals) -> None:
    pytest.importorskip("zstandard")
    small = compressed(Message("batch", {}, [_TREE["zeros"]]))
    with pytest.raises(ConnectionError, match="received an invalid compressed batch"):
        decompressed(Message("batch", {"compressed": originals}, small.arrays))
    for array in (small.arrays[0][:-9], _TREE["noise"], np.zeros(0, np.uint8)):
        with pytest.raises(ConnectionError, match="received an invalid compressed batch"):
            decompressed(Message("batch", small.fields, [array]))


def test_kinds_that_are_not_supported_are_named(monkeypatch) -> None:
    assert checked_compression("AUTO") == "AUTO"
    assert checked_compression(None) is None
    with pytest.raises(ValueError, match="received compression='SNAPPY'"):
        checked_compression("SNAPPY")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="compression of batches needs zstandard"):
        checked_compression("zstd")

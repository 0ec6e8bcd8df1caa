"""Compressed batches: bit for bit, smaller where they can be, and harmless if damaged."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stratagem.group.transport.wire import Message, pack, unpack
from stratagem.input.batch_messages import (
    checked_compression,
    compressed,
    decompressed,
    pack_batch,
    unpack_batch,
)

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
    message = pack_batch(_TREE, is_compressed=True, split=1)
    plain = pack_batch(_TREE, split=1)
    assert sum(one.nbytes for one in message.arrays) < sum(one.nbytes for one in plain.arrays) / 20
    found = unpack_batch(unpack([bytes(frame) for frame in pack(message)]))
    assert found.keys() == _TREE.keys()
    for name, wanted in _TREE.items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        if wanted.dtype == object:
            assert found[name].tolist() == wanted.tolist()
        else:
            assert found[name].tobytes() == wanted.tobytes(), name


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
def test_damaged_descriptions_are_refused(originals) -> None:
    pytest.importorskip("zstandard")
    small = compressed(Message("batch", {}, [_TREE["zeros"]]))
    with pytest.raises(ConnectionError, match="received an invalid compressed batch"):
        decompressed(Message("batch", {"compressed": originals}, small.arrays))


def test_damaged_bytes_are_refused() -> None:
    pytest.importorskip("zstandard")
    small = compressed(Message("batch", {}, [np.arange(100_000) // 7]))
    for array in (small.arrays[0][:-9], _TREE["noise"], np.zeros(0, np.uint8)):
        with pytest.raises(ConnectionError, match="received an invalid compressed batch"):
            decompressed(Message("batch", small.fields, [array]))


def test_kinds_that_are_not_supported_are_named(monkeypatch) -> None:
    assert checked_compression("AUTO") == "AUTO"
    assert checked_compression(None) is None
    with pytest.raises(ValueError, match="compression='SNAPPY' is not supported"):
        checked_compression("SNAPPY")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ImportError, match="compression of batches needs zstandard"):
        checked_compression("zstd")

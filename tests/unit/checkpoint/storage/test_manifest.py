"""Manifests: checksums of arrays and of the text, and damage that they notice."""

from __future__ import annotations

import json
import zlib

import ml_dtypes
import numpy as np
import pytest

from stratagem.checkpoint.storage.shard_reader import (
    FORMAT,
    SHARDED_FORMAT,
    add_checksum,
    check_array,
    describe_items,
    verified_manifest,
)
from stratagem.errors import DataLossError

MATRIX = np.arange(6, dtype="<f4").reshape(2, 3)


def test_arrays_are_described_by_the_crc_of_their_bytes_in_row_order() -> None:
    arrays = {
        "a": MATRIX,
        "transposed": MATRIX.T,
        "scalar": np.array(True),
        "empty": np.zeros((0, 4), np.int8),
        "half": np.ones(3, ml_dtypes.bfloat16),
    }
    entries = describe_items({"one": arrays})["one"]
    assert [entry["path"] for entry in entries] == list(arrays)
    for entry, array in zip(entries, arrays.values(), strict=True):
        assert entry["shape"] == list(array.shape)
        assert entry["dtype"] == array.dtype.name
        assert entry["crc32"] == zlib.crc32(array.tobytes(order="C"))
    assert json.loads(json.dumps(entries)) == entries


@pytest.mark.parametrize(
    "other",
    [MATRIX + 1e-6, MATRIX.reshape(3, 2), MATRIX.astype("<i4"), MATRIX.view("<i4"), -MATRIX],
    ids=["value", "shape", "dtype", "same bytes", "sign"],
)
def test_array_that_differs_is_damage(other) -> None:
    (entry,) = describe_items({"one": {"kernel": MATRIX}})["one"]
    check_array(entry, MATRIX.copy(), "/ckpt-1")
    with pytest.raises(DataLossError, match=r"/ckpt-1 is damaged: the array kernel differs"):
        check_array(entry, other, "/ckpt-1")


def test_manifest_comes_back_without_its_checksum() -> None:
    manifest = {"items": describe_items({"step": {"a": MATRIX}}), "step": 3}
    stored = json.loads(json.dumps(add_checksum(manifest)))
    assert verified_manifest(stored, "here") == {**manifest, "format": FORMAT}
    reordered = dict(sorted(stored.items(), reverse=True))
    assert verified_manifest(reordered, "here")["step"] == 3


@pytest.mark.parametrize("change", [{"step": 4}, {"more": 1}, {"crc32": 0}, {"crc32": None}])
def test_manifest_that_was_changed_is_damage(change) -> None:
    stored = {**add_checksum({"step": 3}), **change}
    with pytest.raises(DataLossError, match="its manifest has a wrong checksum"):
        verified_manifest(stored, "here")


@pytest.mark.parametrize("other", [None, [], "text", {}, {"step": 1}])
def test_manifest_of_another_library_is_refused(other) -> None:
    with pytest.raises(ValueError, match=r"here was not written by sg\.train\.Checkpoint"):
        verified_manifest(other, "here")


def test_manifest_of_a_later_format_is_refused() -> None:
    later = {**add_checksum({"step": 3}), "format": SHARDED_FORMAT + 1}
    with pytest.raises(ValueError, match=rf"here has format {SHARDED_FORMAT + 1}"):
        verified_manifest(later, "here")

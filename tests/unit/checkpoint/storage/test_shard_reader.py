"""Parts of arrays: the same values as the whole, other files stay unread, damage is found."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.checkpoint.storage.files import check_arrays, read_arrays, read_manifest, write
from stratagem.checkpoint.storage.shard_reader import ShardReader
from stratagem.errors import DataLossError
from tests.unit.checkpoint.storage.test_shards import ARRAYS, written

LARGE = np.random.default_rng(1).standard_normal((512, 600), "float32")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = written(tmp_path / "one", 2)
    (entries,) = read_manifest(folder)["items"].values()
    return folder, {entry["path"]: entry for entry in entries}


def _cuts(size: int) -> list[slice]:
    """Parts of an axis: all, halves, and one across every boundary."""
    half = size // 2
    return [slice(0, size), slice(0, half), slice(half, size), slice(1, size - 1)]


@pytest.mark.parametrize("path", ARRAYS)
def test_any_part_of_an_array(path: str, saved: Any) -> None:
    folder, entries = saved
    array = ARRAYS[path]
    regions = list(itertools.product(*map(_cuts, array.shape)))
    read = ShardReader(folder).read("pytree", entries[path], regions)
    for region, part in zip(regions, read, strict=True):
        np.testing.assert_array_equal(part, array[region], strict=True)


def test_parts_of_an_array_that_was_saved_whole(tmp_path: Path) -> None:
    arrays = {"large": LARGE, "transposed": LARGE.T, "small": np.ones(3)}
    write(tmp_path / "one", {"state": arrays}, {})
    entries = read_manifest(tmp_path / "one")["items"]["state"]
    reader = ShardReader(tmp_path / "one")
    assert [reader.can_read("state", entry) for entry in entries] == [True, True, False]
    for entry in entries[:2]:
        region = (slice(3, 300), slice(100, 200))
        (part,) = reader.read("state", entry, [region])
        np.testing.assert_array_equal(part, arrays[entry["path"]][region], strict=True)


def test_only_the_files_of_the_part_are_needed(saved: Any) -> None:
    """Process 1 has every second shard."""
    folder, entries = saved
    for file in folder.glob("pytree/shards.process_1/d/*"):
        file.unlink()
    shard = (slice(0, 2), slice(0, 600))
    reader = ShardReader(folder)
    (part,) = reader.read("pytree", entries["a/rows"], [shard])
    np.testing.assert_array_equal(part, ARRAYS["a/rows"][shard])
    reader.verify("pytree", entries["a/rows"], [shard])
    for work in (reader.read, reader.verify):
        with pytest.raises(DataLossError, match=r"the array a/rows differs from the saved one"):
            work("pytree", entries["a/rows"], [(slice(2, 4), slice(0, 600))])


def test_damaged_shard_is_found(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", 1)
    manifest = read_manifest(folder)
    for file in folder.glob("pytree/shards.process_0/d/*"):
        content = bytearray(file.read_bytes())
        content[::16] = bytes(255 - byte for byte in content[::16])
        file.write_bytes(content)
    for work in (read_arrays, check_arrays):
        with pytest.raises(DataLossError, match="one is damaged"):
            work(folder, manifest, ["pytree"])

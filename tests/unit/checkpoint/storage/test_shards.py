"""Shards of several processes become one Zarr array that Orbax reads, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as orbax
import pytest

from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.files import check_arrays, read_arrays, read_manifest
from stratagem.checkpoint.storage.shard_reader import SHARDED_FORMAT
from stratagem.checkpoint.storage.shards import (
    ShardedArray,
    ShardedWrite,
    report_shard_error,
    shard_key,
    shards_item,
    wait_for_shards,
    write_shards,
)
from stratagem.errors import DeadlineExceededError

NOISE = np.random.default_rng(0).standard_normal((8, 6), "float32")
ARRAYS = {
    "a/rows": np.random.default_rng(1).standard_normal((8, 600), "float32"),
    "a/columns": NOISE.astype("float64"),
    "half": NOISE.astype(ml_dtypes.bfloat16),
    "bytes": NOISE.view(np.int8),
    "blocks": np.arange(4 * 6 * 5, dtype="int32").reshape(4, 6, 5),
}
GRIDS = {
    "a/rows": (4, 1),
    "a/columns": (1, 2),
    "half": (2, 3),
    "bytes": (2, 1),
    "blocks": (2, 3, 1),
}
WHOLE = {"a/first": np.ones(7), "scalar": np.array(3.0), "z/empty": np.zeros((0, 4), "int8")}


def sharded(path: str) -> ShardedArray:
    array = ARRAYS[path]
    sizes = zip(array.shape, GRIDS[path], strict=True)
    return ShardedArray(
        array.shape, str(array.dtype), tuple(size // count for size, count in sizes)
    )


def shards(path: str) -> dict[str, np.ndarray]:
    one = sharded(path)
    found = {}
    for position in np.ndindex(one.grid):
        places = zip(position, one.shard_shape, strict=True)
        index = tuple(slice(at * size, (at + 1) * size) for at, size in places)
        found[shard_key(path, position)] = ARRAYS[path][index]
    return found


def written(folder: Path, num_processes: int, notes: Mapping[str, Any] | None = None) -> Path:
    """Writes a checkpoint whose shards are dealt out to processes."""
    order = {"a/first": None} | {path: sharded(path) for path in ARRAYS}
    order |= {"scalar": None, "z/empty": None}
    write = ShardedWrite(folder.with_name("temporary"), num_processes, {"pytree": order})
    every = [shard for path in ARRAYS for shard in shards(path).items()]
    for process_id in range(num_processes):
        own = dict(every[process_id::num_processes])
        write_shards(write.folder, process_id, {shards_item("pytree"): own})
    wait_for_shards(write, limit_s=0, check=lambda: None)
    files.write(folder, {"pytree": WHOLE}, notes or {}, write)
    return folder


@pytest.mark.parametrize("num_processes", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_orbax_reads_whole_arrays(num_processes: int, tmp_path: Path) -> None:
    folder = written(tmp_path / "one", num_processes)
    assert [path.name for path in tmp_path.iterdir()] == ["one"]
    tree: Any = orbax.load_checkpointables(folder)["pytree"]
    for path, expected in (
        ARRAYS | {"scalar": WHOLE["scalar"], "a/first": WHOLE["a/first"]}
    ).items():
        value = tree
        for name in path.split("/"):
            value = value[name]
        np.testing.assert_array_equal(value, expected, strict=True)


def test_arrays_keep_their_order_and_values(tmp_path: Path) -> None:
    folder = written(tmp_path / "one", 2, {"step": 3})
    manifest = read_manifest(folder)
    assert (manifest["step"], manifest["format"]) == (3, SHARDED_FORMAT)
    read = read_arrays(folder, manifest, ["pytree"])["pytree"]
    assert list(read) == ["a/first", *ARRAYS, "scalar", "z/empty"]
    for path, expected in (ARRAYS | WHOLE).items():
        np.testing.assert_array_equal(read[path], expected, strict=True)
    check_arrays(folder, manifest, ["pytree"])
    (some,) = read_arrays(folder, manifest, {"pytree": ["half"]}).values()
    assert list(some) == ["half"]


def test_error_of_another_process_is_raised(tmp_path: Path) -> None:
    write = ShardedWrite(tmp_path / "ckpt" / "temporary", 2, {})
    write_shards(write.folder, 0, {})
    report_shard_error(write.folder, 1, OSError("disk full"))
    with pytest.raises(OSError, match=r"(?s)of process 1 in .* could not be.*disk full"):
        wait_for_shards(write, limit_s=9, check=lambda: None)
    (tmp_path / "file").touch()
    report_shard_error(tmp_path / "file", 1, OSError("disk full"))  # is left out without a folder
    with pytest.raises(DeadlineExceededError, match=r"Process 0 has not written its shards"):
        wait_for_shards(ShardedWrite(tmp_path / "new", 1, {}), limit_s=0, check=lambda: None)


def test_unwritable_folder_is_reported_here_and_there(tmp_path: Path) -> None:
    (tmp_path / "process_1").mkdir()
    (tmp_path / "process_1" / "pytree").touch()  # a file in the place of the folder
    own = {shards_item("pytree"): shards("half")}
    with pytest.raises(OSError, match=r"shards of process 1 in .* could not be written"):
        write_shards(tmp_path, 1, own)
    write_shards(tmp_path, 0, {})
    with pytest.raises(OSError, match=r"shards of process 1 in .* could not be written"):
        wait_for_shards(ShardedWrite(tmp_path, 2, {}), limit_s=9, check=lambda: None)


def test_lost_process_ends_the_wait_unless_it_has_begun(tmp_path: Path) -> None:
    def lost() -> None:
        if (tmp_path / "process_0").is_dir():
            write_shards(tmp_path, 0, {})  # by its storage process, which goes on
        raise RuntimeError("worker 0 is lost")

    write = ShardedWrite(tmp_path, 1, {})
    with pytest.raises(RuntimeError, match="worker 0 is lost"):
        wait_for_shards(write, limit_s=60, check=lost)
    (tmp_path / "process_0").mkdir()
    wait_for_shards(write, limit_s=60, check=lost)


def test_failed_save_leaves_nothing(tmp_path: Path) -> None:
    write = ShardedWrite(tmp_path / "temporary", 1, {"pytree": {"half": sharded("half")}})
    some = dict(list(shards("half").items())[1:])
    write_shards(write.folder, 0, {shards_item("pytree"): some})
    with pytest.raises(OSError, match=r"could not be written: KeyError: 'half/c/0/0'"):
        files.write(tmp_path / "one", {"pytree": {}}, {}, write)
    assert not list(tmp_path.iterdir())
    written(tmp_path / "two", 1)
    with pytest.raises(FileExistsError, match="already exists"):
        written(tmp_path / "two", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["two"]

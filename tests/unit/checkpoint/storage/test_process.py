"""Writes of checkpoints in the storage process, and reads here."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import orbax.checkpoint.experimental.v1 as orbax
import pytest

from stratagem.checkpoint.storage import files, shard_reader
from stratagem.checkpoint.storage.files import (
    OrbaxWarnings,
    check_arrays,
    collect_warnings,
    is_whole,
    portions,
    read_arrays,
    read_manifest,
)
from stratagem.checkpoint.storage.process import (
    StorageProcess,
    available_memory_bytes,
    fits_in_memory,
    has_room_for_copy,
    storage_process,
)
from stratagem.checkpoint.storage.shard_reader import (
    FORMAT,
    SHARDED_FORMAT,
    ShardReader,
    add_checksum,
    check_array,
    describe_items,
    verified_manifest,
)
from stratagem.checkpoint.storage.shards import (
    ShardedArray,
    ShardedWrite,
    report_shard_error,
    shard_key,
    shards_item,
    wait_for_shards,
    write_shards,
)
from stratagem.errors import DataLossError, DeadlineExceededError, NotFoundError

SMALL_NOISE = np.random.default_rng(0).standard_normal((8, 6), "float32")
ARRAYS = {
    "a/rows": np.random.default_rng(1).standard_normal((8, 600), "float32"),
    "a/columns": SMALL_NOISE.astype("float64"),
    "half": SMALL_NOISE.astype(ml_dtypes.bfloat16),
    "bytes": SMALL_NOISE.view(np.int8),
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


# Writes of checkpoints in the storage process, and reads here.


ITEMS: Any = {
    "pytree": {"a/kernel": np.arange(6, dtype="float32").reshape(2, 3), "b": np.array(3)},
    "empty_state": {},
}


@pytest.fixture(scope="module")
def process() -> Iterator[StorageProcess]:
    process = StorageProcess()
    yield process
    process.close()


def nothing(folder: Path) -> None:
    del folder


def write(process: StorageProcess, folder: Path, then: Any = nothing) -> Any:
    return process.write(lambda: folder, ITEMS, {"note": 1}, then=then)


@pytest.mark.parametrize("writes_here", [True, False])
def test_checkpoints_of_either_process_are_read(
    process: StorageProcess, tmp_path: Path, writes_here: bool
) -> None:
    followed: list[Path] = []
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(process.pid, signum)  # which end training, and not this process
    if writes_here:
        files.write(tmp_path / "one", ITEMS, {"note": 1})
    else:
        write(process, tmp_path / "one", followed.append).result()
        assert followed == [tmp_path / "one"]
    manifest = read_manifest(tmp_path / "one")
    assert manifest["note"] == 1
    arrays = read_arrays(tmp_path / "one", manifest, ["pytree", "empty_state"])
    assert list(arrays) == ["pytree", "empty_state"]
    for path, array in ITEMS["pytree"].items():
        np.testing.assert_array_equal(arrays["pytree"][path], array, strict=True)


def test_wait_returns_after_the_callbacks(process: StorageProcess, tmp_path: Path) -> None:
    """`sync` must not return before a callback reports its error, which it raises."""
    go_on = threading.Event()
    received: list[Any] = []

    def then(folder: Path) -> None:
        go_on.wait()

    def tell(writing: Any) -> None:
        time.sleep(0.2)
        received.append(writing)

    writing = write(process, tmp_path / "one", then)
    writing.add_done_callback(tell)
    go_on.set()
    process.wait()
    assert received == [writing]


def test_arrays_are_verified(tmp_path: Path) -> None:
    files.write(tmp_path / "one", ITEMS, {})
    manifest = read_manifest(tmp_path / "one")
    manifest["items"]["pytree"][0]["crc32"] ^= 1
    for work in (check_arrays, read_arrays):
        work(tmp_path / "one", manifest, {"pytree": ["b"], "empty_state": []})
        with pytest.raises(DataLossError, match="the array a/kernel differs"):
            work(tmp_path / "one", manifest, ["pytree"])


def test_portions_hold_every_entry_once_and_no_more_than_they_may(monkeypatch) -> None:
    monkeypatch.setattr("stratagem.checkpoint.storage.files._PORTION_BYTES", 100)
    sizes = {"a": [50, 40, 20, 300], "b": [0, 10, 90]}
    entries = {
        name: [{"path": f"{name}{i}", "shape": [n], "dtype": "int8"} for i, n in enumerate(some)]
        for name, some in sizes.items()
    }
    found = [
        {name: [entry["path"] for entry in some] for name, some in portion.items()}
        for portion in portions(entries)
    ]
    assert found == [
        {"a": ["a0", "a1"]},
        {"a": ["a2"]},
        {"a": ["a3"]},  # larger than a portion
        {"b": ["b0", "b1", "b2"]},
    ]
    assert list(portions({"a": []})) == []


def test_reserved_memory_counts_as_room_for_a_copy(monkeypatch) -> None:
    monkeypatch.setattr(
        "stratagem.checkpoint.storage.process.fits_in_memory", lambda size: size <= 1000
    )
    process = storage_process()
    before = process.memory_bytes
    assert has_room_for_copy(before + 1000)
    assert not has_room_for_copy(before + 1001)
    process.reserve(before + 500)
    process.wait()
    assert has_room_for_copy(before + 1500)
    monkeypatch.undo()
    monkeypatch.setattr("stratagem.checkpoint.storage.process.available_memory_bytes", lambda: 900)
    assert [fits_in_memory(size) for size in (600, 601)] == [True, False]  # a third stays free


def test_a_copy_is_written_whatever_becomes_of_the_arrays(
    process: StorageProcess, tmp_path: Path
) -> None:
    value = np.zeros(1000)
    go_on = threading.Event()

    def when_changed() -> Path:
        go_on.wait()
        return tmp_path / "one"

    writing = process.write(when_changed, {"pytree": {"x": value}}, {}, then=nothing)
    value[:] = 1
    go_on.set()
    writing.result()
    manifest = read_manifest(tmp_path / "one")
    assert not read_arrays(tmp_path / "one", manifest, ["pytree"])["pytree"]["x"].any()


def test_errors_keep_their_class(process: StorageProcess, tmp_path: Path) -> None:
    write(process, tmp_path / "one").result()
    with pytest.raises(FileExistsError, match="already exists"):
        write(process, tmp_path / "one").result()
    with pytest.raises(NotFoundError, match="does not exist"):
        read_manifest(tmp_path / "two")
    manifest = read_manifest(tmp_path / "one")
    for file in (tmp_path / "one").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataLossError, match="is damaged"):
        read_arrays(tmp_path / "one", manifest, ["pytree"])
    with pytest.raises(DataLossError, match="is damaged"):
        check_arrays(tmp_path / "one", manifest, ["pytree"])
    assert process.is_alive


@pytest.mark.slow
def test_signals_may_come_before_it_has_loaded_anything(tmp_path: Path) -> None:
    process = StorageProcess()
    os.kill(process.pid, signal.SIGTERM)
    write(process, tmp_path / "one").result()
    assert is_whole(tmp_path / "one")
    process.close()
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_lost_process_raises_and_is_replaced(tmp_path: Path) -> None:
    first = storage_process()
    assert storage_process() is first
    os.kill(first.pid, signal.SIGKILL)
    with pytest.raises(OSError, match=r"(?s)process exited with -9 during write of"):
        write(first, tmp_path / "one").result()
    assert not (tmp_path / "one").exists()
    second = storage_process()
    assert second is not first
    write(second, tmp_path / "one").result()
    assert is_whole(tmp_path / "one")


@pytest.mark.slow
def test_stopped_process_raises_within_the_limit_and_is_replaced(tmp_path, monkeypatch) -> None:
    first = storage_process()
    os.kill(first.pid, signal.SIGSTOP)
    monkeypatch.setenv("STRATAGEM_SAVE_TIMEOUT_S", "0.2")
    with pytest.raises(DeadlineExceededError, match=r"has not answered during write of"):
        write(first, tmp_path / "one").result()
    monkeypatch.delenv("STRATAGEM_SAVE_TIMEOUT_S")
    second = storage_process()
    assert second is not first
    write(second, tmp_path / "one").result()
    assert is_whole(tmp_path / "one")


@pytest.mark.slow
def test_pending_write_finishes_when_training_is_killed(tmp_path: Path) -> None:
    program = f"""
import time
from pathlib import Path
import numpy as np
from stratagem.checkpoint.storage.process import storage_process

folder = Path({str(tmp_path)!r})
items = {{"pytree": {{"x": np.arange(10**7)}}}}
process = storage_process()
process.write(lambda: folder / "one", items, {{}}, then=lambda folder: None)
while not list(folder.glob("one*")):
    time.sleep(0.001)
print(process.pid, flush=True)
time.sleep(600)
"""
    killed = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    pid = int(killed.stdout.readline())
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdout.close()
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        threading.Event().wait(0.05)
    assert is_whole(tmp_path / "one")


# Arrays: reading without Orbax gives the same values, of other layouts, too.

NOISE = np.random.default_rng(0).standard_normal((1000, 1200), "float32")

LARGE = {
    "a/kernel": NOISE,
    "a/transposed": NOISE.T,
    "b.with.dots": NOISE.astype("float64"),
    "half": NOISE.astype(ml_dtypes.bfloat16),
    "bytes": NOISE.view(np.int8).reshape(-1),
    "zeros": np.zeros((2, 3, 2**18), "int32"),
}
SMALL = {"scalar": np.array(3.0), "bias": np.ones(7), "below": np.zeros(2**20 - 1, "int8")}
ITEMS_OF_LARGE_ARRAYS: dict[str, Any] = {
    "pytree": LARGE | SMALL,
    "state": {"value": NOISE[:500]},
    "empty": {},
}


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    return _write(tmp_path / "one")


def _write(folder: Path) -> tuple[Path, dict[str, Any]]:
    files.write(folder, ITEMS_OF_LARGE_ARRAYS, {})
    return folder, read_manifest(folder)


def _largest_file(folder: Path) -> Path:
    return max(folder.rglob("d/*"), key=lambda path: path.stat().st_size)


def _flip_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _lose_index(file: Path) -> None:
    (item,) = (folder for folder in file.parents if folder.name == "state")
    (item / "manifest.ocdbt").write_bytes(b"nothing")


def _require_equal(read: Any) -> None:
    assert {name: list(arrays) for name, arrays in read.items()} == {
        name: list(arrays) for name, arrays in ITEMS_OF_LARGE_ARRAYS.items()
    }
    for name, arrays in ITEMS_OF_LARGE_ARRAYS.items():
        for path, array in arrays.items():
            np.testing.assert_array_equal(read[name][path], array, strict=True)


def test_arrays_are_read_without_orbax(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    by_orbax = orbax.load_checkpointables(saved[0])
    monkeypatch.setattr(orbax, "load_checkpointables", None)
    folder, manifest = saved
    with monkeypatch.context() as patch:
        patch.setattr(ShardReader, "_read_other", None)
        read = read_arrays(folder, manifest, list(ITEMS_OF_LARGE_ARRAYS))
        check_arrays(folder, manifest, list(ITEMS_OF_LARGE_ARRAYS))
    _require_equal(read)
    np.testing.assert_array_equal(read["pytree"]["a/kernel"], by_orbax["pytree"]["a"]["kernel"])
    np.testing.assert_array_equal(read["state"]["value"], by_orbax["state"]["value"])


def test_readers_end_with_the_process_and_raise_the_first_error() -> None:
    """Threads of an executor would keep a process that a disk hangs from its exit."""
    begun: list[int] = []

    def work(number: int) -> bool:
        begun.append(number)
        if number in {1, 2}:
            raise OSError(f"error {number}")
        return threading.current_thread().daemon

    assert shard_reader._in_threads(work, [3, 4, 5]) == [True, True, True]
    with pytest.raises(OSError, match="error 1"):
        shard_reader._in_threads(work, [6, 1, 2, 7])
    assert sorted(begun) == [1, 2, 3, 4, 5, 6, 7]


def test_large_arrays_are_handed_to_the_receiver(saved: Any) -> None:
    folder, manifest = saved
    some = read_arrays(folder, manifest, {"pytree": ["bias", "half"]}, np.shape)["pytree"]
    assert set(some) == {"bias", "half"}
    assert some["half"] == NOISE.shape
    np.testing.assert_array_equal(some["bias"], SMALL["bias"], strict=True)
    seen: set[int] = set()
    read_arrays(folder, manifest, ["pytree"], lambda array: seen.add(array.ctypes.data))
    assert len(seen) < len(LARGE)  # they share memory until they are copied


@pytest.mark.parametrize("option", ["use_compression", "use_ocdbt"])
def test_other_layouts_are_read(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As older versions wrote them, or plain Orbax."""
    original: Callable[..., Any] = files._saving

    def saving(library: Any) -> Any:
        context = original(library)
        setattr(context.array.saving, option, option == "use_compression")
        return context

    monkeypatch.setattr(files, "_saving", saving)
    folder, manifest = _write(tmp_path / "one")
    _require_equal(read_arrays(folder, manifest, list(ITEMS_OF_LARGE_ARRAYS)))
    check_arrays(folder, manifest, list(ITEMS_OF_LARGE_ARRAYS))
    region = (slice(3, 300), slice(100, 200))
    (entry,) = (one for one in manifest["items"]["pytree"] if one["path"] == "half")
    (part,) = ShardReader(folder).read("pytree", entry, [region])
    np.testing.assert_array_equal(part, LARGE["half"][region], strict=True)


@pytest.mark.parametrize(
    "damage",
    [
        _flip_byte,
        pytest.param(Path.unlink, marks=pytest.mark.slow),
        pytest.param(lambda file: file.write_bytes(b""), marks=pytest.mark.slow),
        pytest.param(_lose_index, marks=pytest.mark.slow),
    ],
)
def test_damaged_arrays_are_not_returned(saved: Any, damage: Callable[[Path], object]) -> None:
    folder, manifest = saved
    damage(_largest_file(folder / "state"))
    read_arrays(folder, manifest, ["pytree"])
    for receive in (None, np.array):
        with pytest.raises(DataLossError, match="is damaged: the array value"):
            read_arrays(folder, manifest, ["state"], receive)
    with pytest.raises(DataLossError, match="is damaged: the array value"):
        check_arrays(folder, manifest, ["state"])


# Parts of arrays: the same values as the whole, other files stay unread, damage is found.


@pytest.fixture
def saved_of_shard_reader(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    folder = written(tmp_path / "one", 2)
    (entries,) = read_manifest(folder)["items"].values()
    return folder, {entry["path"]: entry for entry in entries}


def _cuts(size: int) -> list[slice]:
    """Parts of an axis: all, halves, and one across every boundary."""
    half = size // 2
    return [slice(0, size), slice(0, half), slice(half, size), slice(1, size - 1)]


@pytest.mark.parametrize("path", ARRAYS)
def test_any_part_of_an_array(path: str, saved_of_shard_reader: Any) -> None:
    folder, entries = saved_of_shard_reader
    array = ARRAYS[path]
    regions = list(itertools.product(*map(_cuts, array.shape)))
    read = ShardReader(folder).read("pytree", entries[path], regions)
    for region, part in zip(regions, read, strict=True):
        np.testing.assert_array_equal(part, array[region], strict=True)


def test_parts_of_an_array_that_was_saved_whole(tmp_path: Path) -> None:
    arrays = {"large": NOISE, "transposed": NOISE.T, "small": np.ones(3)}
    files.write(tmp_path / "one", {"state": arrays}, {})
    entries = read_manifest(tmp_path / "one")["items"]["state"]
    reader = ShardReader(tmp_path / "one")
    for entry in entries:
        region = (slice(1, 3), slice(100, 200))[: len(entry["shape"])]
        (part,) = reader.read("state", entry, [region])
        np.testing.assert_array_equal(part, arrays[entry["path"]][region], strict=True)


def test_only_the_files_of_the_part_are_needed(saved_of_shard_reader: Any) -> None:
    """Process 1 has every second shard."""
    folder, entries = saved_of_shard_reader
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
    for file in folder.glob("pytree/shards.process_0/d/*"):
        content = bytearray(file.read_bytes())
        content[::16] = bytes(255 - byte for byte in content[::16])
        file.write_bytes(content)
    for work in (read_arrays, check_arrays):
        with pytest.raises(DataLossError, match="one is damaged"):
            work(folder, read_manifest(folder), ["pytree"])


# Manifests: checksums of arrays and of the text, and damage that they notice.

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


@pytest.mark.parametrize("change", [{"step": 4}, {"more": 1}, {"crc32": 0}, {"crc32": None}])
def test_manifest_that_was_changed_is_damage(change) -> None:
    manifest = {"items": describe_items({"step": {"a": MATRIX}}), "step": 3}
    stored = json.loads(json.dumps(add_checksum(manifest)))
    assert verified_manifest(stored, "here") == {**manifest, "format": FORMAT}
    reordered = dict(sorted(stored.items(), reverse=True))
    assert verified_manifest(reordered, "here")["step"] == 3
    with pytest.raises(DataLossError, match="its manifest has a wrong checksum"):
        verified_manifest({**stored, **change}, "here")


@pytest.mark.parametrize("other", [None, [], "text", {}, {"step": 1}, {"format": 99}])
def test_manifest_of_another_library_or_format_is_refused(other) -> None:
    later = other == {"format": 99}
    stored = {**add_checksum({"step": 3}), **other} if later else other
    words = "here has format 99" if later else r"here was not written by sg\.train\.Checkpoint"
    with pytest.raises(ValueError, match=words):
        verified_manifest(stored, "here")


# Memory that a process can still allocate, on a machine and in a container.

MEMINFO = "MemTotal: 2000 kB\nMemFree: 100 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\n"


def machine(folder: Path, **files: str) -> tuple[Path, Path]:
    meminfo = folder / "meminfo"
    meminfo.write_text(MEMINFO)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return meminfo, folder


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, 1_024_000),  # no container; the page cache is available
        ("500000\n", 500_000 - 300_000 + 50_000),
        ("100000\n", 0),
        ("9000000000\n", 1_024_000),
        ("max\n", 1_024_000),
    ],
)
def test_a_container_has_what_its_limit_leaves_and_the_machine_has(
    tmp_path: Path, limit: str | None, expected: int
) -> None:
    others = {"current": "300000\n", "stat": "anon 1\ninactive_file 50000\n"}
    files = {} if limit is None else {"max": limit, **others}
    assert available_memory_bytes(*machine(tmp_path, **files)) == expected
    assert available_memory_bytes(tmp_path / "none", tmp_path) is None  # not on Linux


# Orbax's log warnings as causes of its errors.


def test_errors_in_warnings_are_kept_once_and_not_printed(caplog) -> None:
    collected = OrbaxWarnings()
    with collect_warnings(collected):
        for _ in range(2):
            try:
                raise KeyError("shard 3")
            except KeyError:
                logging.getLogger("absl").warning("cannot read", exc_info=True)
        logging.getLogger("asyncio").error("no error with it")
        logging.getLogger("elsewhere").warning("passes")
    assert collected.causes == ["KeyError: 'shard 3'"]
    assert [record.message for record in caplog.records] == ["passes"]
    logging.getLogger("absl").warning("printed")  # afterwards they go their way again
    assert "printed" in caplog.text


# Checkpoints in files: what is left of one that could not be written.


def test_what_is_still_written_after_a_failure_is_removed(tmp_path, monkeypatch) -> None:
    left = tmp_path / "ckpt.orbax-checkpoint-tmp-7"
    left.mkdir()
    remove, removed = shutil.rmtree, []

    def remove_beside_a_writer(folder: Path, **options: Any) -> None:
        remove(folder, **options)
        removed.append(folder)
        if len(removed) < 3:  # a thread of Orbax makes it again
            folder.mkdir()

    monkeypatch.setattr(files.shutil, "rmtree", remove_beside_a_writer)
    files._remove_unfinished(tmp_path / "ckpt")
    assert not left.exists()
    assert removed == [left] * 3

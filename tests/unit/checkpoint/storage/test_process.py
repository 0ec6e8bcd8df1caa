"""Reads and writes of checkpoints in the storage process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.files import (
    check_arrays,
    is_whole,
    portions,
    read_arrays,
    read_manifest,
)
from stratagem.checkpoint.storage.process import StorageProcess, has_room_for_copy, storage_process
from stratagem.errors import DataLossError, DeadlineExceededError, NotFoundError

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


def test_this_process_reads_checkpoints_of_the_storage_process(
    process: StorageProcess, tmp_path: Path
) -> None:
    followed: list[Path] = []
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


def test_storage_process_reads_checkpoints_of_this_process(
    process: StorageProcess, tmp_path: Path
) -> None:
    files.write(tmp_path / "one", ITEMS, {"note": 2})
    manifest = process.read_manifest(tmp_path / "one")
    assert manifest == read_manifest(tmp_path / "one")
    arrays = process.read_arrays(tmp_path / "one", manifest, ["pytree", "empty_state"])
    for path, array in ITEMS["pytree"].items():
        np.testing.assert_array_equal(arrays["pytree"][path], array, strict=True)
    assert arrays["empty_state"] == {}


def test_arrays_are_verified_by_either_process(process: StorageProcess, tmp_path: Path) -> None:
    files.write(tmp_path / "one", ITEMS, {})
    manifest = read_manifest(tmp_path / "one")
    manifest["items"]["pytree"][0]["crc32"] ^= 1
    for check in (check_arrays, process.check_arrays):
        check(tmp_path / "one", manifest, {"pytree": ["b"], "empty_state": []})
        with pytest.raises(DataLossError, match="the array a/kernel differs"):
            check(tmp_path / "one", manifest, ["pytree"])


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
        process.read_manifest(tmp_path / "two")
    manifest = process.read_manifest(tmp_path / "one")
    for file in (tmp_path / "one").rglob("d/*"):
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataLossError, match="is damaged"):
        process.read_arrays(tmp_path / "one", manifest, ["pytree"])
    with pytest.raises(DataLossError, match="is damaged"):
        process.check_arrays(tmp_path / "one", manifest, ["pytree"])
    assert process.is_alive


def test_signals_that_end_training_do_not_end_it(process: StorageProcess, tmp_path: Path) -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        os.kill(process.pid, signum)
    write(process, tmp_path / "one").result()
    assert is_whole(tmp_path / "one")


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
    with pytest.raises(DeadlineExceededError, match=r"has not answered for 0\.2 s during write of"):
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


@pytest.mark.slow
def test_error_that_was_not_raised_is_printed_at_exit(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    program = f"""
from pathlib import Path
import stratagem as sg
checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
checkpoint.write({str(tmp_path / "file" / "one")!r}, sg.train.CheckpointOptions(enable_async=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert "could not be written" in done.stderr

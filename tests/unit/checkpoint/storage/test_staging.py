"""Exchange of arrays through shared memory, and snapshots there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stratagem.checkpoint.storage.staging import MemorySlots, Staging

ITEMS: dict[str, dict[str, np.ndarray[Any, Any]]] = {
    "model": {
        "kernel": np.arange(6, dtype="float32").reshape(2, 3),
        "scalar": np.array(7, "int64"),
        "half": np.ones((3,), ml_dtypes.bfloat16),
        "flags": np.array([True, False]),
        "nothing": np.zeros((0, 4)),
    },
    "other": {"kernel": np.full((5,), 2.5)},
}


def equal(found: Any, wanted: Any) -> bool:
    return all(
        found[item][path].dtype == array.dtype and np.array_equal(found[item][path], array)
        for item, arrays in wanted.items()
        for path, array in arrays.items()
    )


def test_second_user_of_the_memory_sees_the_same_and_later_arrays() -> None:
    ours = Staging()
    theirs = Staging(os.dup(ours.descriptor))
    placed = ours.put(ITEMS)
    assert all(one.offset_bytes % 64 == 0 for one in placed)
    found = theirs.get(placed)
    assert [list(arrays) for arrays in found.values()] == [list(one) for one in ITEMS.values()]
    assert list(found) == list(ITEMS)
    assert equal(found, ITEMS)
    larger = {"model": {"kernel": np.random.default_rng(0).random(100_000)}}
    assert equal(theirs.get(ours.put(larger)), larger)
    assert equal(theirs.get(ours.put(ITEMS)), ITEMS)


def test_large_arrays_are_copied_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.checkpoint.storage.staging._PIECE_BYTES", 1000)
    monkeypatch.setattr("stratagem.checkpoint.storage.staging.available_cores", lambda: 3.0)
    rng = np.random.default_rng(0)
    large = {
        "even": rng.random(1000),
        "odd": rng.random((7, 333)).astype("float32"),
        "transposed": rng.random((50, 40)).T,
        "half": rng.random(3001).astype(ml_dtypes.bfloat16),
        "scalar": np.array(3),
    }
    staging = Staging()
    assert equal(staging.get(staging.put({"model": large})), {"model": large})


def test_memory_is_reserved_once_and_keeps_what_it_holds() -> None:
    staging = Staging()
    placed = staging.put(ITEMS)
    arrays = {str(i): np.ones(501, "int8") for i in range(1000)} | {"large": np.ones(10**6)}
    staging.reserve(sum(array.nbytes for array in arrays.values()))  # also for room between them
    reserved_bytes = staging.size_bytes
    assert equal(staging.get(placed), ITEMS)
    assert equal(staging.get(staging.put({"model": arrays})), {"model": arrays})
    staging.reserve(10)
    assert staging.size_bytes == reserved_bytes
    staging.put({"a": {"x": np.zeros(10**7)}})
    assert staging.size_bytes > reserved_bytes
    assert os.fstat(staging.descriptor).st_nlink == 0  # without a name, nothing stays behind


# Snapshots in shared memory that survives the process.


def items(value: float) -> Any:
    return {"model": {"x": np.full((3, 2), float(value)), "n": np.array(int(value))}, "empty": {}}


def numbers(slots: MemorySlots) -> list[int]:
    return [one.number for one in slots.get()]


def test_the_next_process_finds_the_last_two_that_are_whole_and_spares_the_newest(
    tmp_path: Path,
) -> None:
    slots = MemorySlots(tmp_path / "made", "worker-0")
    assert slots.get() == []
    for step in (1, 2, 3):
        slots.put(step, items(step), {"step": step})
    assert numbers(MemorySlots(tmp_path / "made", "worker-1")) == []
    again = MemorySlots(tmp_path / "made", "worker-0")
    newest, older = again.get()
    assert (newest.number, older.number, newest.notes) == (3, 2, {"step": 3})
    assert list(newest.items) == ["model", "empty"]
    np.testing.assert_array_equal(newest.items["model"]["x"], np.full((3, 2), 3.0), strict=True)
    assert older.items["model"]["n"] == 2
    again.put(4, {"a": {"x": np.zeros(100_000)}}, {})  # other arrays, in the place of the older
    assert numbers(again) == [4, 3]
    assert again.get()[0].items["a"]["x"].shape == (100_000,)
    again.put(5, items(5), {})
    again.forget_after(4)  # those newer than the restored step
    assert numbers(MemorySlots(tmp_path / "made", "worker-0")) == [4]
    again.put(5, items(5), {})
    assert numbers(again) == [5, 4]
    file = tmp_path / "made" / "worker-0.0"
    whole = file.read_bytes()
    for at in (0, whole.index(b'"number"')):  # the mark or the description are incomplete
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert numbers(MemorySlots(tmp_path / "made", "worker-0")) == [4]
    file.write_bytes(whole)
    again.forget_after(None)
    assert numbers(again) == []


def test_a_process_that_is_killed_leaves_a_whole_one(tmp_path: Path) -> None:
    program = f"""
import sys
import numpy as np
from stratagem.checkpoint.storage.staging import MemorySlots
slots = MemorySlots({str(tmp_path)!r}, "worker-0")
step = 0
while True:
    step += 1
    slots.put(step, {{"a": {{"x": np.full(100_000, step), "y": np.full(7, step)}}}}, {{"at": step}})
    if step > 2:
        print(step, flush=True)
"""
    for _ in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(3):
            printed = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        found = MemorySlots(tmp_path, "worker-0").get()
        assert found[0].number >= printed
        for one in found:
            assert one.notes == {"at": one.number}
            assert (one.items["a"]["x"] == one.number).all()
            assert (one.items["a"]["y"] == one.number).all()
        for file in tmp_path.iterdir():
            file.unlink()

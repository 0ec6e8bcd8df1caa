"""Snapshots in shared memory that survives the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.checkpoint.storage.staging import MemorySlots


def items(value: float) -> Any:
    return {"model": {"x": np.full((3, 2), float(value)), "n": np.array(int(value))}, "empty": {}}


def numbers(slots: MemorySlots) -> list[int]:
    return [one.number for one in slots.get()]


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path / "made", "worker-0")
    assert slots.get() == []
    for step in (1, 2, 3):
        slots.put(step, items(step), {"step": step})
    newest, older = slots.get()
    assert (newest.number, older.number) == (3, 2)
    assert newest.notes == {"step": 3}
    assert list(newest.items) == ["model", "empty"]
    np.testing.assert_array_equal(newest.items["model"]["x"], np.full((3, 2), 3.0), strict=True)
    assert older.items["model"]["n"] == 2


def test_the_next_process_finds_them_and_spares_the_newest(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, "worker-0")
    for step in (1, 2, 3):
        slots.put(step, items(step), {})
    assert numbers(MemorySlots(tmp_path, "worker-1")) == []
    again = MemorySlots(tmp_path, "worker-0")
    assert numbers(again) == [3, 2]
    again.put(4, items(4), {})
    assert numbers(again) == [4, 3]


def test_snapshots_newer_than_the_restored_step_are_deleted(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, "worker-0")
    for step in (5, 6):
        slots.put(step, items(step), {})
    slots.forget_after(5)
    assert numbers(MemorySlots(tmp_path, "worker-0")) == [5]
    slots.put(6, items(6), {})
    assert numbers(slots) == [6, 5]
    slots.forget_after(None)
    assert numbers(slots) == []


def test_other_arrays_take_their_place(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, "worker-0")
    for step, value in enumerate((np.zeros(3), np.zeros(100_000), np.zeros((2, 2), "int8"))):
        slots.put(step, {"a": {"x": value}}, {})
    found = MemorySlots(tmp_path, "worker-0").get()
    assert [(one.number, one.items["a"]["x"].shape) for one in found] == [
        (2, (2, 2)),
        (1, (100_000,)),
    ]


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


@pytest.mark.parametrize("where", ["mark", "description"])
def test_incomplete_snapshots_are_ignored(where: str, tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path, "worker-0")
    for step in (1, 2):
        slots.put(step, items(step), {})
    newest = tmp_path / "worker-0.1"
    content = bytearray(newest.read_bytes())
    at = 0 if where == "mark" else content.index(b'"number"')
    content[at] ^= 1
    newest.write_bytes(content)
    assert numbers(MemorySlots(tmp_path, "worker-0")) == [1]

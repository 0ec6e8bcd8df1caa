"""Goodput events of saves and restores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.checkpoint import saving
from stratagem.checkpoint import saving as checkpoint_events
from stratagem.observe.run_events import writer
from stratagem.observe.run_events.writer import EventWriter
from tests.unit.observe.run_events.test_wait_clock import ticking


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EventWriter]:
    with EventWriter(tmp_path / "run", "worker", 0, num_processes=1, interval_s=0) as made:
        monkeypatch.setattr(checkpoint_events, "current_events", lambda: made)
        clock = ticking()
        for module in (checkpoint_events, saving):
            monkeypatch.setattr(module, "time", clock)
        yield made


def recorded(folder: Path, *kinds: str) -> list[dict[str, Any]]:
    (file,) = (folder / "run" / "events").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [line for line in lines if line["kind"] in kinds]


def test_save_and_restore_events_carry_the_step(events: EventWriter, tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(value=sg.Variable(1.0))
    events.step(7)
    path = checkpoint.save(tmp_path / "ckpt")
    events.step(9)
    checkpoint.restore(path)
    begun, ended, restored = recorded(tmp_path, "save_started", "save_ended", "restored")
    assert (begun["step"], ended["step"], restored["step"]) == (7, 7, 7)
    assert (begun["is_asynchronous"], ended["failed"], restored["source"]) == (False, None, path)
    assert 0 < ended["stall_s"] == ended["duration_s"]
    assert events.last_step == 7


def test_save_behind_training_stalls_for_less_than_it_takes(
    events: EventWriter, tmp_path: Path
) -> None:
    checkpoint = sg.train.Checkpoint(value=sg.Variable(1.0))
    events.step(3)
    checkpoint.save(tmp_path / "ckpt", sg.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()
    begun, ended = recorded(tmp_path, "save_started", "save_ended")
    assert begun["is_asynchronous"]
    assert ended["is_asynchronous"]
    assert 0 < ended["stall_s"] < ended["duration_s"]


@pytest.mark.parametrize("is_async", [False, True])
def test_failed_save_says_why(is_async: bool, events: EventWriter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    checkpoint = sg.train.Checkpoint(value=sg.Variable(1.0))

    def save() -> None:
        options = sg.train.CheckpointOptions(enable_async=is_async)
        checkpoint.save(tmp_path / "file" / "ckpt", options)
        checkpoint.sync()

    with pytest.raises(OSError, match="could not be written"):
        save()
    (ended,) = recorded(tmp_path, "save_ended")
    assert "could not be written" in ended["failed"]


def test_in_memory_backup_is_recorded(events: EventWriter, tmp_path: Path) -> None:
    memory = sg.checkpoint.MemoryBackup(sg.train.Checkpoint(value=sg.Variable(1.0)), tmp_path / "m")
    events.step(5)
    memory.save(1)
    memory.restore()
    (restored,) = recorded(tmp_path, "restored")
    assert (restored["step"], restored["source"]) == (5, "memory")


def test_duration_of_a_backup_is_recorded_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = sg.checkpoint.MemoryBackup(sg.train.Checkpoint(value=sg.Variable(1.0)), tmp_path / "m")
    clock = ticking()
    monkeypatch.setattr(checkpoint_events, "time", clock)
    monkeypatch.setattr(writer, "time", clock)
    with EventWriter(tmp_path / "run", "worker", 0, num_processes=1) as events:
        monkeypatch.setattr(checkpoint_events, "current_events", lambda: events)
        events.step(5)
        memory.save(1)
        events.step(6)
    first, second = recorded(tmp_path, "step")
    assert first["keeping_s"] == 0
    assert 0 < second["keeping_s"] <= second["elapsed_s"]

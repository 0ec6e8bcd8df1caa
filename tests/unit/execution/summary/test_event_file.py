"""Event files, read back record by record with TensorBoard's own framing."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from stratagem.execution.summary.writer import EventFile, tensorboard


def records(path: Path) -> list[Any]:
    """The events of a file: length, its checksum, data, its checksum."""
    data, events = path.read_bytes(), []
    event = tensorboard("compat.proto.event_pb2").Event
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def value(number: float) -> Any:
    return tensorboard("compat.proto.summary_pb2").Summary.Value(tag="loss", simple_value=number)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "new" / "folder"


def test_file_begins_with_its_version_and_holds_events_in_order(folder) -> None:
    file = EventFile(str(folder), max_queue=100, flush_millis=10**6, suffix=".one")
    for step in (3, 1):
        file.add(value(step / 2), step, 1000.0 + step)
    file.close()
    (path,) = folder.iterdir()
    assert path.name.startswith("events.out.tfevents.")
    assert path.suffix == ".one"
    first, *events = records(path)
    assert first.file_version == "brain.Event:2"
    found = [(e.step, e.wall_time, e.summary.value[0].simple_value) for e in events]
    assert found == [(3, 1003.0, 1.5), (1, 1001.0, 0.5)]


def test_events_are_flushed_when_the_queue_is_full(folder) -> None:
    file = EventFile(str(folder), max_queue=2, flush_millis=10**6, suffix="")
    (path,) = folder.iterdir()
    counts = []
    for step in range(4):
        file.add(value(1.0), step, 0.0)
        counts.append(len(records(path)) - 1)
    assert counts == [0, 0, 3, 3]
    file.flush()
    assert len(records(path)) == 5
    file.close()


def test_two_files_of_one_second_have_different_names(folder) -> None:
    for _ in range(2):
        EventFile(str(folder), max_queue=1, flush_millis=1, suffix="").close()
    assert len(list(folder.iterdir())) == 2

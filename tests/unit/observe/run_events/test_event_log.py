"""Lines of an event file, and disks that take none."""

from __future__ import annotations

import os

import pytest

from stratagem.observe.run_events import writer as event_log
from stratagem.observe.run_events.writer import EventLog


def test_lines_are_written_at_once_and_not_after_the_end(tmp_path) -> None:
    log = EventLog(tmp_path / "new", "worker-0")
    log.write("first")
    assert (tmp_path / "new" / "worker-0.jsonl").read_text() == "first\n"
    log.close()
    log.close()
    log.write("second")
    assert (tmp_path / "new" / "worker-0.jsonl").read_text() == "first\n"


def test_process_of_the_same_name_gets_a_file_of_its_own(tmp_path) -> None:
    for _ in range(3):
        EventLog(tmp_path, "worker-0").close()
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["worker-0.2.jsonl", "worker-0.3.jsonl", "worker-0.jsonl"]


def test_torn_line_is_ended_before_the_next_one(tmp_path, monkeypatch) -> None:
    log = EventLog(tmp_path, "worker-0")
    real = os.write
    monkeypatch.setattr(event_log.os, "write", lambda file, data: real(file, data[:3]))
    with pytest.warns(RuntimeWarning, match="only part"):
        log.write("first")
    monkeypatch.setattr(event_log.os, "write", real)
    log.write("second")
    log.close()
    assert (tmp_path / "worker-0.jsonl").read_text() == "fir\nsecond\n"


def test_folder_that_cannot_be_made_warns_once(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="Events of this run are lost"):
        log = EventLog(tmp_path / "file", "worker-0")
    log.write("lost without another warning, which would be an error here")

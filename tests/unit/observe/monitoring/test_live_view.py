"""Loops over a growing folder; tests/unit/cli/test_watch.py has one in a terminal."""

from __future__ import annotations

import pytest

from stratagem.errors import NotFoundError
from stratagem.observe.monitoring import terminal_view as live_view
from stratagem.observe.monitoring.run_state import Watcher
from stratagem.observe.run_events.records import encode
from tests.unit.observe.goodput.runs import end, first_step, process, run, straggling, write


def test_frame_of_a_run(tmp_path, capsys) -> None:
    with pytest.raises(NotFoundError, match="has no events"):
        live_view.print_frame("run", Watcher(tmp_path))
    write(tmp_path, straggling())
    live_view.print_frame("run", Watcher(tmp_path))
    assert "101 of 101" in capsys.readouterr().out


def test_view_ends_with_the_run(tmp_path, capsys) -> None:
    write(tmp_path, straggling())
    live_view.show("run", Watcher(tmp_path), 1e6)
    assert "finished" in capsys.readouterr().out


def test_exports_end_a_while_after_the_run(tmp_path, monkeypatch) -> None:
    seconds = [0.0]
    monkeypatch.setattr(live_view.time, "monotonic", lambda: seconds[0])

    def sleep(interval_s: float) -> None:
        seconds[0] += interval_s
        if seconds[0] == 30:
            with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
                file.write(encode(end(30)) + "\n")

    monkeypatch.setattr(live_view.time, "sleep", sleep)
    write(tmp_path, run(process("worker 0", 0, first_step(5, 1))))
    live_view.export(Watcher(tmp_path), 1.0)
    assert seconds[0] == pytest.approx(30 + 60, abs=1.5)

"""A watcher reads what is new, and computes accounts at a bounded cost."""

from __future__ import annotations

import pytest

from stratagem.errors import NotFoundError
from stratagem.observe.goodput.account import account_for
from stratagem.observe.monitoring import run_state as watcher_module
from stratagem.observe.monitoring.run_state import Watcher
from stratagem.observe.run_events.records import encode
from tests.unit.observe.goodput.runs import EPOCH_S, gang_restart, steps, straggling, write


def test_state_and_account_of_a_run(tmp_path) -> None:
    write(tmp_path, straggling())
    watcher = Watcher(tmp_path, clock=lambda: EPOCH_S + 41)
    assert watcher.poll().step == 101
    assert watcher.account() == account_for(straggling())
    values = watcher.as_dict(watcher.poll())
    assert values["account"]["startup_s"] == pytest.approx(10)


def test_folder_that_appears_later(tmp_path) -> None:
    watcher = Watcher(tmp_path / "run")
    assert watcher.poll().tasks == ()
    assert watcher.account() is None
    assert watcher.as_dict(watcher.poll())["account"] is None
    with pytest.raises(NotFoundError, match="has no events"):
        watcher.poll_existing()
    write(tmp_path / "run", straggling())
    assert len(watcher.poll().tasks) == 2
    assert len(watcher.poll_existing().tasks) == 2


def test_listeners_get_each_event_once(tmp_path) -> None:
    write(tmp_path, straggling())
    heard = []
    watcher = Watcher(tmp_path)
    watcher.listeners.append(heard.append)
    watcher.poll()
    watcher.poll()
    assert sorted(heard, key=str) == sorted(straggling().processes, key=str)


def test_account_that_took_long_is_not_computed_for_each_line(tmp_path, monkeypatch) -> None:
    """One of 1 s is due again after 20 s."""
    seconds = iter(range(0, 1000))
    monkeypatch.setattr(watcher_module.time, "perf_counter", lambda: float(next(seconds)))
    running = gang_restart()
    write(tmp_path, type(running)(processes=running.processes[1:3]))
    watcher = Watcher(tmp_path, clock=lambda: EPOCH_S + 50)
    watcher.poll()
    first = watcher.account()
    path = tmp_path / "events" / "worker-1.1.jsonl"
    changes = 0
    for number in range(19):
        with path.open("a") as file:
            file.write(encode(steps(50 + number, 51 + number, 40 + number, 40 + number)) + "\n")
        watcher.poll()
        changes += watcher.account() is not first
        first = watcher.account()
    assert changes <= 1

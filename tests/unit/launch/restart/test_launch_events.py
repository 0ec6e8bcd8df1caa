"""Launcher's events, read back by the goodput report."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart.task_group import LaunchEvents
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.observe.goodput.account import account_for
from stratagem.observe.run_events.reader import read_run
from stratagem.observe.run_events.records import (
    EndEvent,
    FailureEvent,
    NoticeEvent,
    RestartEvent,
    StartEvent,
)

FAILED = ExitStatus(name="worker 1", returncode=-9, at_s=1.0)
LEFT = ExitStatus(name="worker 0", returncode=42, at_s=1.0)


def recorded(folder) -> list:
    (launcher,) = [p for p in read_run(folder).processes if p.task == "launcher 0"]
    return list(launcher.events)


def test_failure_is_reported_once_a_start(tmp_path) -> None:
    with LaunchEvents(LaunchOptions(workers=3, ps=1, run_dir=tmp_path)) as events:
        for restart in (1, 2):
            events.failure(FAILED)
            events.failure(FAILED)
            events.restart(restart, FAILED)
        events.end(0)
    start, *between, end = recorded(tmp_path)
    assert isinstance(start, StartEvent)
    assert start.num_processes == 3
    assert [type(event) for event in between] == [FailureEvent, RestartEvent] * 2
    failure, restart = between[:2]
    assert failure.lost == "worker 1"
    assert failure.reason == "worker 1 failed first: killed by SIGKILL"
    assert (restart.attempt, restart.cause) == (1, "worker 1 failed (killed by SIGKILL)")
    assert isinstance(end, EndEvent)
    assert end.code == 0


def test_that_a_task_saved_and_left_is_no_failure(tmp_path) -> None:
    with LaunchEvents(LaunchOptions(run_dir=tmp_path)) as events:
        events.failure(LEFT)
        events.restart(1, LEFT)
        events.notice("SIGTERM to the launcher")
    _, restart, notice = recorded(tmp_path)
    assert restart.cause == "worker 0 saved and left (exit code 42)"
    assert isinstance(notice, NoticeEvent)


def test_error_of_the_launcher_is_its_end(tmp_path) -> None:
    with (
        pytest.raises(OSError, match="no more processes"),
        LaunchEvents(LaunchOptions(run_dir=tmp_path)),
    ):
        raise OSError("no more processes")
    end = recorded(tmp_path)[-1]
    assert (end.code, end.reason) == (1, "OSError('no more processes')")


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with LaunchEvents(LaunchOptions()) as events:
        events.failure(FAILED)
        events.notice("SIGTERM")
        events.restart(1, FAILED)
        events.end(0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_run_of_real_tasks_tells_what_happened_to_them(script, folder, capfd) -> None:
    """In tasks that change their folder; the one that fails tells of itself too."""
    path = script(
        """
        import time
        import stratagem as sg
        os.makedirs("elsewhere", exist_ok=True)
        os.chdir("elsewhere")
        attempt = int(os.environ["STRATAGEM_RESTART_COUNT"])
        sg.goodput.step(10 * attempt + 10)
        if task["index"] == 1 and attempt == 0:
            while not os.path.exists("stepped"):
                time.sleep(0.01)
            raise ValueError("loss is nan")
        open("stepped", "w").close()
        """
    )
    sg.launch.run(path, workers=2, max_restarts=1, run_dir="run")
    run = read_run(folder / "run")
    tasks = [(p.task, p.start.attempt) for p in run.processes if p.trains]
    assert sorted(tasks) == [("worker 0", 0), ("worker 0", 1), ("worker 1", 0), ("worker 1", 1)]
    kinds = [type(event).__name__ for event in recorded(folder / "run")]
    assert kinds == ["StartEvent", "FailureEvent", "RestartEvent", "EndEvent"]
    account = account_for(run)
    assert account.is_over
    assert len(account.failures) == 1
    assert "worker 1" in account.failures[0].what
    assert account.failures[0].resumed_s is not None
    assert account.problems == ()

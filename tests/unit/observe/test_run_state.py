"""State of a run from its events, read in one go or as they arrive."""

from __future__ import annotations

import dataclasses
import json

import pytest

from stratagem.errors import NotFoundError
from stratagem.observe import run_state as watcher_module
from stratagem.observe.events import ProcessEvents, encode
from stratagem.observe.run_state import LOST_AFTER_S, ProcessState, RunSnapshot, RunState, Watcher
from tests.unit.observe.runs import (
    EPOCH_S,
    end,
    failure,
    first_step,
    gang_restart,
    members,
    members_come_and_go,
    memory,
    process,
    progress,
    restart,
    restored,
    run,
    steps,
    straggling,
    write,
)


def snapshot(events, second: float) -> RunSnapshot:
    state = RunState()
    state.add(events.processes, EPOCH_S + second)
    return state.snapshot(EPOCH_S + second)


def test_run_with_a_straggler() -> None:
    """The last lines are 50 steps in 20 s."""
    shown = snapshot(straggling(), 41)
    assert (shown.step, shown.total_steps, shown.is_over) == (101, 101, True)
    assert shown.values == {"loss": 1.0, "accuracy": 0.75}
    assert shown.steps_per_s == 2.5
    first, second = shown.tasks
    assert (first.task, second.task) == ("worker 0", "worker 1")
    assert (second.cause, second.late_s) == ("unknown", pytest.approx(0.2))
    assert (first.cause, first.late_s) == (None, None)
    assert shown.stragglers == (
        "worker 1 is slow: the others wait 200 ms of each 400 ms step for it",
    )
    assert (first.host_bytes, first.device_bytes) == (300 * 1024**2, 600)


def test_events_may_arrive_one_by_one() -> None:
    whole = straggling()
    state = RunState()
    ordered = sorted(
        ((one.at_s(event), one, event) for one in whole.processes for event in one.events),
        key=lambda item: item[0],
    )
    for at_s, one, event in ordered:
        state.add([ProcessEvents(start=one.start, events=(event,))], at_s)
    assert state.snapshot(EPOCH_S + 41) == snapshot(whole, 41)


def test_lost_and_failed_workers_say_why() -> None:
    events = run(
        process("worker 0", 0, first_step(5, 1), failure(9, "worker 1"), end(10, 1, "no peer")),
        process("worker 1", 0, first_step(5, 1)),
    )
    shown = snapshot(events, 11)
    assert [(task.phase, task.note) for task in shown.tasks] == [
        ("failed", "no peer"),
        ("lost", "no sign of life"),
    ]
    assert not shown.is_over


def test_run_is_not_over_while_its_launcher_may_start_the_tasks_again() -> None:
    events = run(process("launcher 0", 0), process("worker 0", 0, end(10, 1)))
    assert not snapshot(events, 11).is_over


def test_second_launch_replaces_the_first() -> None:
    first = straggling().processes
    second = process("worker 0", 100, first_step(105, 1), memory(106, 5))
    shown = snapshot(run(*first, second), 107)
    assert shown.num_launches == 2
    assert [task.task for task in shown.tasks] == ["worker 0"]
    assert (shown.step, shown.values) == (1, {})
    assert shown.age_s == 7


def test_launcher_that_starts_again_begins_a_launch_though_it_was_killed_before() -> None:
    one = (process("launcher 0", 0), process("worker 0", 1, first_step(5, 1)))
    two = (process("launcher 0", 60), process("worker 0", 61, first_step(65, 1)))
    assert snapshot(run(*one, *two), 66).num_launches == 2


def test_restart_by_the_launcher_and_a_new_worker_begin_no_launch() -> None:
    early = [process(f"worker {index}", 1, first_step(5, 1), end(20)) for index in range(2)]
    later = process("worker 2", 40, first_step(45, 1))
    assert snapshot(run(process("launcher 0", 0, restart(30, 1)), *early, later), 46).tasks[-1]
    assert snapshot(run(process("launcher 0", 0), *early, later), 46).num_launches == 1
    assert snapshot(gang_restart(), 78).num_launches == 1


def test_time_left_follows_from_speed_and_total() -> None:
    events = run(
        process("worker 0", 0, first_step(10, 1), steps(10, 20, 2, 51), progress(20, 51, 101))
    )
    assert snapshot(events, 21).left_s == pytest.approx(10)
    unknown = run(process("worker 0", 0, first_step(10, 1), steps(10, 20, 2, 51)))
    assert snapshot(unknown, 21).left_s is None


def test_start_on_a_clock_that_was_set_back_does_no_harm() -> None:
    """The restarted worker seems to have started before its first process."""
    first, second = process("worker 0", 100, first_step(105, 1)), process("worker 0", 0, attempt=1)
    state = RunState()
    for one in (first, second):
        state.add([one], EPOCH_S + 110)
    shown = state.snapshot(EPOCH_S + 111)
    assert shown.age_s >= 0
    assert all(task.heard_s >= 0 for task in shown.tasks)


def test_folder_without_events_and_json() -> None:
    shown = RunState().snapshot(EPOCH_S)
    assert (shown.step, shown.tasks, shown.num_launches, shown.is_over) == (None, (), 0, False)
    values = json.loads(json.dumps(snapshot(straggling(), 41).as_dict()))
    assert values.keys() == {field.name for field in dataclasses.fields(RunSnapshot)}
    assert values["tasks"][1]["task"] == "worker 1"


def test_restarts_of_members_are_none_of_the_run() -> None:
    shown = snapshot(members_come_and_go(), 62)
    assert (shown.num_members, shown.num_expected, shown.num_restarts) == (3, 3, 0)
    assert [(task.task, task.phase) for task in shown.tasks if "worker" in task.task] == [
        (f"worker {index}", "finished") for index in range(3)
    ]
    other = snapshot(gang_restart(), 78)
    assert (other.num_members, other.num_restarts) == (None, 1)


# Events of a worker that goes on after another one is lost at second 3.
STAYED = (
    *(first_step(2, 1), steps(2, 3, 2, 3), members(4, 1, 1, lost="1", pause_s=0.5)),
    steps(3, 4, 4, 4),
)


def lost_for_good(*last) -> ProcessEvents:
    return process("worker 1", 0, first_step(2, 1), *last)


@pytest.mark.parametrize("last", [(), (end(3.5, 1, "ValueError: bad"),)], ids=["killed", "failed"])
def test_run_is_over_without_a_member_that_stays_lost(last) -> None:
    shown = snapshot(run(process("worker 0", 0, *STAYED), lost_for_good(*last)), 5)
    assert not shown.is_over
    events = run(process("worker 0", 0, *STAYED, end(5)), lost_for_good(*last))
    shown = snapshot(events, 6)
    assert shown.is_over
    lost = shown.tasks[1]
    assert (lost.phase, lost.note) == ("lost", "the others continue")


def test_process_that_started_after_a_loss_is_not_the_lost_one() -> None:
    """Worker 1 starts at 3.25, before the others report that it was lost at 3."""
    again = process("worker 1", 3.25, attempt=1)
    shown = snapshot(run(process("worker 0", 0, *STAYED), lost_for_good(), again), 5)
    assert [task.phase for task in shown.tasks] == ["running", "restarting"]


# Phases of a process, its speed, and its time on the host.


def state_of(*events, read_s: float, attempt: int = 0, task: str = "worker 0") -> ProcessState:
    news = process(task, 0, *events, attempt=attempt)
    state = ProcessState(news.start)
    state.add(news, EPOCH_S + read_s)
    return state


def phase(state: ProcessState, second: float) -> str:
    return state.phase(EPOCH_S + second).value


RUNNING = (first_step(10, 1), steps(10, 20, 2, 51))


@pytest.mark.parametrize(
    ("events", "second", "more", "expected"),
    [
        ((), 5, {}, "starting"),
        ((memory(60, 1),), 61, {}, "starting"),
        (RUNNING, 21, {}, "running"),
        ((*RUNNING, memory(40, 1)), 41, {}, "waiting"),
        (RUNNING, 20 + LOST_AFTER_S + 1, {}, "lost"),
        ((*RUNNING, end(21)), 500, {}, "finished"),
        ((*RUNNING, end(21, 3)), 500, {}, "failed"),
        ((*RUNNING, failure(21, "worker 1")), 22, {}, "restarting"),
        ((*RUNNING, restored(21, 7)), 22, {}, "restarting"),
        # Steps of 20 s: a silence of 25 s between them is no wait.
        ((first_step(10, 1), steps(10, 50, 2, 3), memory(75, 1)), 76, {}, "running"),
        # A later start is a restart until its first step.
        ((), 1, {"attempt": 1}, "restarting"),
        ((first_step(3, 8),), 3, {"attempt": 1}, "running"),
        # A launcher has nothing to report; a server gives signs of life.
        ((), 100, {"task": "launcher 0"}, "running"),
        ((), 100, {"task": "ps 0"}, "lost"),
    ],
)
def test_phase_follows_from_the_events(events, second, more, expected) -> None:
    read_s = 0 if "task" in more else second
    assert phase(state_of(*events, read_s=read_s, **more), second) == expected


def test_loss_that_another_process_reported_counts_until_the_task_is_heard_again() -> None:
    state = state_of(*RUNNING, read_s=20)
    state.lost_s = EPOCH_S + 21
    assert phase(state, 22) == "lost"
    state.add(process("worker 0", 0, steps(20, 30, 52, 101)), EPOCH_S + 30)
    assert phase(state, 30) == "running"


def test_clock_of_the_viewer_may_differ() -> None:
    """An hour ahead or behind, and news arrive: they are heard when they are read."""
    for offset_s in (3600.0, -3600.0):
        state = state_of(*RUNNING, read_s=20 + offset_s)
        state.add(process("worker 0", 0, steps(20, 30, 52, 101)), EPOCH_S + 30 + offset_s)
        assert phase(state, 31 + offset_s) == "running"
        assert state.heard_s == EPOCH_S + 30 + offset_s


def test_speed_is_of_the_last_steps_without_first_ones() -> None:
    state = state_of(steps(0, 10, 1, 1), read_s=10)
    assert state.steps_per_s() is None
    state.add(process("worker 0", 0, steps(10, 20, 2, 101)), EPOCH_S + 20)
    assert state.steps_per_s() == 10
    state.add(process("worker 0", 0, steps(60, 70, 102, 151)), EPOCH_S + 70)
    assert state.steps_per_s() == 5


# A watcher reads what is new, and computes accounts at a bounded cost.


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

"""Phases of a process, its speed, and its time on the host."""

from __future__ import annotations

import pytest

from stratagem.observe.monitoring.run_state import LOST_AFTER_S, ProcessState
from tests.unit.observe.goodput.runs import (
    EPOCH_S,
    end,
    failure,
    first_step,
    memory,
    process,
    restored,
    steps,
)


def state_of(*events, read_s: float, attempt: int = 0, task: str = "worker 0") -> ProcessState:
    news = process(task, 0, *events, attempt=attempt)
    state = ProcessState(news.start)
    state.add(news, EPOCH_S + read_s)
    return state


def phase(state: ProcessState, second: float) -> str:
    return state.phase(EPOCH_S + second).value


RUNNING = (first_step(10, 1), steps(10, 20, 2, 51))


@pytest.mark.parametrize(
    ("events", "second", "expected"),
    [
        ((), 5, "starting"),
        ((memory(60, 1),), 61, "starting"),
        (RUNNING, 21, "running"),
        ((*RUNNING, memory(40, 1)), 41, "waiting"),
        (RUNNING, 20 + LOST_AFTER_S + 1, "lost"),
        ((*RUNNING, end(21)), 500, "finished"),
        ((*RUNNING, end(21, 3)), 500, "failed"),
        ((*RUNNING, failure(21, "worker 1")), 22, "restarting"),
        ((*RUNNING, restored(21, 7)), 22, "restarting"),
        # Steps of 20 s: a silence of 25 s between them is no wait.
        ((first_step(10, 1), steps(10, 50, 2, 3), memory(75, 1)), 76, "running"),
    ],
)
def test_phase_follows_from_the_events(events, second, expected) -> None:
    assert phase(state_of(*events, read_s=second), second) == expected


def test_later_start_is_a_restart_until_its_first_step() -> None:
    assert phase(state_of(read_s=1, attempt=1), 1) == "restarting"
    assert phase(state_of(first_step(3, 8), read_s=3, attempt=1), 3) == "running"


@pytest.mark.parametrize(("task", "expected"), [("launcher 0", "running"), ("ps 0", "lost")])
def test_silence_of_other_tasks(task, expected) -> None:
    """A launcher has nothing to report; a server gives signs of life."""
    assert phase(state_of(read_s=0, task=task), 100) == expected


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


def test_time_on_the_host_excludes_waits() -> None:
    waits = steps(10, 20, 2, 51, waited=8.0)
    assert state_of(first_step(10, 1), waits, read_s=20).host_s_per_step() == pytest.approx(0.04)
    assert state_of(*RUNNING, read_s=20).host_s_per_step() is None
    assert state_of(read_s=20).host_s_per_step() is None


@pytest.mark.parametrize(
    ("code", "expected"), [(None, "lost"), (0, "finished"), (1, "lost")], ids=str
)
def test_process_without_which_others_continue(code, expected) -> None:
    last = () if code is None else (end(21, code),)
    state = state_of(*RUNNING, *last, read_s=22)
    state.has_survivors = True
    assert phase(state, 22) == expected

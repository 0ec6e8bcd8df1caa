"""Breakdown of wall time: runs computed by hand, and properties of every run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.observe.goodput import CAUSES, account_for
from tests.unit.observe.runs import (
    EPOCH_S,
    account_of,
    end,
    failure,
    first_step,
    gang_restart,
    notice,
    parts,
    process,
    restart,
    restored,
    run,
    save,
    steps,
    times,
)

TO_STEP_9 = (first_step(2, 1), steps(2, 10, 2, 9))
TO_STEP_10 = (first_step(1, 1), steps(1, 10, 2, 10))
PLAIN = (first_step(10, 1), steps(10, 20, 2, 11), end(20))
SAVED = (first_step(1, 1), steps(1, 5, 2, 5))
RESTARTED = (restored(13, 0), first_step(14, 1), end(14))

# Processes, the causes that took time, and of each failure: when it was reported, the time of its
# detection, and the time until the next step was done.
RUNS = {
    "without failures": (
        [
            process("worker 0", 0, first_step(10, 1), steps(10, 30, 2, 21), end(32)),
            process("worker 1", 1, first_step(10, 1), steps(10, 30, 2, 21), end(32)),
        ],
        {"starting": 10, "useful": 20, "waiting": 2},
        [],
    ),
    # It may load JAX for all; the workers begin 3 and 4 seconds after it.
    "a launcher before the first task": (
        [
            process("launcher 0", 0, end(20)),
            process("worker 0", 3, *PLAIN),
            process("worker 1", 4, *PLAIN),
        ],
        {"starting": 10, "useful": 10},
        [],
    ),
    "restart of all from a checkpoint": (
        list(gang_restart().processes),
        {"starting": 10, "useful": 40, "repeated": 10, "detecting": 5, "restarting": 13},
        [(45, 5, 13)],
    ),
    # The failure is not reported, and there is no launcher: the next start implies it.
    "all die without a word": (
        [
            process("worker 0", 0, *TO_STEP_9),
            process("worker 1", 0, *TO_STEP_9),
            process("worker 0", 15, first_step(30, 1), end(31)),
            process("worker 1", 16, first_step(30, 1), end(31)),
        ],
        {"starting": 2, "repeated": 8, "detecting": 5, "restarting": 15, "waiting": 1},
        [(15, 5, 15)],
    ),
    "saves that are waited for and one behind": (
        [
            process(
                *("worker 0", 0, *SAVED, save(5, 8, 5)),
                *(steps(8, 18, 6, 15, busy=9.5), save(10, 16, 8, stall_s=0.5), end(18)),
            )
        ],
        {"starting": 1, "useful": 4 + 9.5, "saving": 3.5},
        [],
    ),
    # The save that was not finished is time in which the failure was not known.
    "failure during a save": (
        [
            process(
                *("worker 0", 0, *SAVED, save(5, 11, 5, failed="worker 1 is gone")),
                failure(11, "worker 1"),
            ),
            process("worker 1", 0, *SAVED, save(5, 30, 5)[0]),
            process("worker 0", 12, *RESTARTED),
            process("worker 1", 12, *RESTARTED),
        ],
        {"starting": 1, "repeated": 4, "detecting": 6, "restarting": 3},
        [(11, 6, 3)],
    ),
    "save that failed and training goes on": (
        [
            process(
                *("worker 0", 0, first_step(1, 1), save(1, 3, 1, failed="disk full")),
                *(steps(3, 5, 2, 3), end(5)),
            )
        ],
        {"starting": 1, "saving": 2, "useful": 2},
        [],
    ),
    # The slowest counts: the others wait for it inside their step.
    "time between the calls": (
        [
            process("worker 0", 0, first_step(1, 1), steps(1, 11, 2, 6, busy=10), end(14)),
            process("worker 1", 0, first_step(1, 1), steps(1, 11, 2, 6, busy=4), end(14)),
        ],
        {"starting": 1, "useful": 4, "waiting": 6 + 3},
        [],
    ),
    "state kept in memory, also of steps that are lost": (
        [
            process(
                *("worker 0", 0, first_step(1, 1), steps(1, 11, 2, 11, busy=7, keeping=2)),
                *(restored(12, 6), first_step(13, 7), end(13)),
            )
        ],
        {"starting": 1, "useful": 3.5, "repeated": 3.5, "saving": 2, "waiting": 2, "restarting": 1},
        [],
    ),
    "no more is kept than there was time": (
        [process("worker 0", 0, first_step(1, 1), steps(1, 3, 2, 3, busy=1.5, keeping=9), end(3))],
        {"starting": 1, "useful": 1.5, "saving": 0.5},
        [],
    ),
    # Elastic: worker 1 is away from second 20 to 50, and worker 0 pauses for one second.
    "others go on while one restarts": (
        [
            process(
                *("worker 0", 0, *PLAIN[:2], failure(20.5, "worker 1")),
                *(restored(20.75, 11, "memory"), first_step(21, 12), steps(21, 50, 13, 41)),
                *(steps(50, 60, 42, 51), end(60)),
            ),
            process("worker 1", 0, *PLAIN[:2]),
            process(
                *("worker 1", 30, restored(50, 41, "memory"), first_step(51, 42)),
                *(steps(51, 60, 43, 51), end(60)),
                attempt=1,
            ),
            process("launcher 0", 0, failure(22, "worker 1"), restart(29, 1)),
        ],
        {"starting": 10, "useful": 49, "detecting": 0.5, "restarting": 0.5},
        [(20.5, 0.5, 0.5)],
    ),
    "going back twice": (
        [
            process(
                *("worker 0", 0, *TO_STEP_10, restored(11, 5)),
                *(first_step(12, 6), steps(12, 15, 7, 9), restored(16, 5), first_step(17, 6)),
                *(steps(17, 20, 7, 9), end(20)),
            )
        ],
        {"starting": 1, "useful": 7, "repeated": 8, "restarting": 2, "waiting": 2},
        [],
    ),
    "going back further the second time": (
        [
            process(
                *("worker 0", 0, *TO_STEP_10, restored(11, 8)),
                *(first_step(12, 9), steps(12, 15, 10, 12), restored(16, 2), first_step(17, 3)),
                end(17),
            )
        ],
        {"starting": 1, "useful": 1, "repeated": 8 + 3, "restarting": 2, "waiting": 2},
        [],
    ),
    "two trainings in one folder": (
        [
            process("worker 0", 0, *TO_STEP_10, end(11)),
            process("worker 0", 20, restored(21, 10), first_step(22, 11), steps(22, 30, 12, 19)),
        ],
        {"starting": 1 + 2, "useful": 9 + 8, "waiting": 10},
        [],
    ),
    "evaluators and servers are not of the group": (
        [
            process("worker 0", 0, *TO_STEP_10, end(10)),
            process("evaluator 0", 0, restored(5, 3), end(70, 1)),
            process("ps 0", 0, restored(6, 2), end(80, 143)),
        ],
        {"starting": 1, "useful": 9},
        [],
    ),
    "only a start": ([process("worker 0", 0)], {}, []),
    "an older state is restored": (
        [process("worker 0", 0, *TO_STEP_10, restored(12, 6))],
        {"starting": 1, "useful": 5, "repeated": 4, "waiting": 2},
        [],
    ),
    "restart without any report": (
        [
            process("launcher 0", 0, restart(12, 1)),
            process("worker 0", 0, *TO_STEP_9),
            process("worker 0", 14, first_step(20, 10), end(20)),
        ],
        {"starting": 2, "useful": 8, "detecting": 2, "restarting": 8},
        [(12, 2, 8)],
    ),
    "second failure before a step was done": (
        [
            process("worker 0", 0, *TO_STEP_9, failure(13, "worker 1"), end(14, 1)),
            process("worker 0", 15, restored(17, 9), failure(20, "worker 2", silence_s=1.5)),
            process("worker 0", 22, restored(24, 9), first_step(30, 10), end(30)),
        ],
        {"starting": 2, "useful": 8, "detecting": 3, "restarting": 17},
        [(13, 3, 17), (20, 1.5, 10)],
    ),
    "failure that several report": (
        [
            process("launcher 0", 0, failure(14, "worker 2"), restart(15, 1)),
            process("worker 0", 0, *TO_STEP_9, failure(12, "worker 2"), end(12.5, 1)),
            process("worker 1", 0, *TO_STEP_9, failure(13, "worker 3"), end(13.5, 1)),
            process("worker 0", 16, first_step(18, 10), end(18)),
        ],
        {"starting": 2, "useful": 8, "detecting": 2, "restarting": 6},
        [(12, 2, 6)],
    ),
    "failure before the first step": (
        [
            process("worker 0", 0, failure(4, "worker 1"), end(5, 1)),
            process("worker 0", 6, first_step(9, 1), steps(9, 10, 2, 2), end(10)),
        ],
        {"starting": 4, "restarting": 5, "useful": 1},
        [(4, None, 5)],
    ),
    "failure for good": (
        [process("worker 0", 0, *TO_STEP_9, failure(12, "worker 1"), end(13, 1))],
        {"starting": 2, "useful": 8, "detecting": 2, "restarting": 1},
        [(12, 2, None)],
    ),
    "a saved checkpoint is a sign of life": (
        [
            process(
                *("worker 0", 0, *SAVED, save(5, 9, 5), failure(11, "worker 1")), first_step(12, 6)
            )
        ],
        {"starting": 1, "useful": 4, "saving": 4, "detecting": 2, "restarting": 1},
        [(11, 2, 1)],
    ),
    # Only the launcher has noticed: ten steps of two lines are done before, through it and after.
    "failure in the middle of steps put together": (
        [process("launcher 0", 0, failure(14.25, "worker 1")), process("worker 0", 0, *PLAIN)],
        {"starting": 10, "useful": 10},
        [(14.25, 4.25, 5.75)],
    ),
    "preemption is reported by the end": (
        [
            process("worker 0", 0, *TO_STEP_10, notice(9.5), save(10, 12, 10), end(12, 42)),
            process("worker 0", 20, restored(22, 10), first_step(25, 11), end(25)),
        ],
        {"starting": 1, "useful": 9, "saving": 2, "restarting": 13},
        [(12, 0, 13)],
    ),
    # Both are reported by a process that started before the first one.
    "second failure of those that go on in memory": (
        [
            process(
                *("worker 0", 0, *TO_STEP_9, failure(11, "worker 1"), restored(12, 9, "memory")),
                *(failure(14, "worker 2"), restored(15, 9, "memory"), first_step(16, 10), end(16)),
            )
        ],
        {"starting": 2, "useful": 8, "detecting": 1, "restarting": 5},
        [(11, 1, 5), (14, None, 2)],
    ),
    "second failure reported by the launcher only": (
        [
            process("launcher 0", 0, failure(11), restart(12, 1), failure(14), restart(15, 2)),
            process("worker 0", 0, *TO_STEP_9),
            process("worker 0", 13),
            process("worker 0", 16, restored(17, 9), first_step(20, 10), end(20)),
        ],
        {"starting": 2, "useful": 8, "detecting": 1, "restarting": 9},
        [(11, 1, 9), (14, None, 6)],
    ),
    # Worker 1 gives up its save after worker 0 has reported.
    "last words after the failure": (
        [
            process("worker 0", 0, *TO_STEP_9, failure(12, "worker 2"), end(12, 1)),
            process("worker 1", 0, *TO_STEP_9, save(10, 13, 9, failed="worker 2 is gone")),
            process("worker 1", 14, first_step(20, 10), end(20)),
            process("worker 0", 15, first_step(20, 10), end(20)),
        ],
        None,
        [(12, 2, 8)],
    ),
    "restarted launcher": (
        [
            process("launcher 0", 0),
            process("worker 0", 0, first_step(2, 1), end(2)),
            process("launcher 0", 5),
            process("worker 0", 6, first_step(8, 2), end(8)),
        ],
        None,
        [],
    ),
    "steps of the first call are done at its end": (
        [
            process("launcher 0", 0, failure(5, "worker 1")),
            process("worker 0", 0, steps(0, 10, 1, 10), end(10)),
        ],
        None,
        [(5, None, 5)],
    ),
    # Another process may finish one more step before the launcher reports the loss.
    "that a process has gone is its own last word": (
        [
            process("launcher 0", 0, failure(12, "worker 1"), restart(13, 1)),
            process("worker 0", 0, *TO_STEP_9, steps(10, 11, 10, 10)),
            process("worker 1", 0, *TO_STEP_9, end(10.5, 1)),
            process("worker 0", 14, first_step(16, 11), end(16)),
        ],
        None,
        [(10.5, 0.5, 0.5)],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_run_counted_by_hand(name) -> None:
    processes, causes, failures = RUNS[name]
    account = account_of(*processes)
    if causes is not None:
        assert parts(account) == pytest.approx(causes)
    # Where only the process itself goes back, there is no failure.
    assert times(account) == failures


def test_account_of_a_run() -> None:
    account = account_for(gang_restart())
    assert account.failures[0].what == "worker 1 lost"
    assert account.failures[0].silence_s == 4.5
    assert (account.num_steps, account.num_repeated) == (42, 10)
    accounts = {name: account_of(*processes) for name, (processes, _, _) in RUNS.items()}
    plain = accounts["without failures"]
    assert (plain.begin_s, plain.whole_s, plain.is_over) == (EPOCH_S, 32, True)
    assert plain.goodput == pytest.approx(20 / 32)
    assert [
        accounts[name].failures[0].what
        for name in (
            "all die without a word",
            "restart without any report",
            "preemption is reported by the end",
        )
    ] == ["worker 0 exited without reporting", "restart 1: worker 1 failed", "worker 0: SIGTERM"]
    assert {
        name: (one.num_steps, one.num_repeated)
        for name, one in accounts.items()
        if one.num_repeated
    } == {
        "restart of all from a checkpoint": (42, 10),
        "all die without a word": (1, 9),
        "failure during a save": (1, 5),
        "state kept in memory, also of steps that are lost": (7, 5),
        "going back twice": (9, 5 + 4),
        "going back further the second time": (3, 2 + 10),
        "an older state is restored": (6, 4),
    }
    servers = accounts["evaluators and servers are not of the group"]
    assert (servers.whole_s, servers.num_processes) == (10, 3)
    assert (accounts["only a start"].whole_s, accounts["only a start"].goodput) == (0, 0)
    unfinished = account_of(process("worker 0", 0, first_step(1, 1), steps(1, 11, 2, 6)))
    assert (unfinished.whole_s, unfinished.is_over) == (11, False)
    lines = (
        *(*TO_STEP_10, failure(11), first_step(12, 11)),
        *(steps(12, 20, 12, 19), failure(24), first_step(31, 20)),
    )
    values = account_of(process("worker 0", 0, *lines)).as_dict()
    assert values["time_to_detect_s"] == {"median": 2.5, "worst": 4}
    assert values["time_to_resume_s"] == {"median": 4, "worst": 7}


_SECONDS = st.floats(0, 100)
_STEPS = st.integers(0, 50)
_EVENTS = st.one_of(
    st.builds(
        lambda a, b, n, m: steps(min(a, b), max(a, b), n, n + m), *[_SECONDS] * 2, _STEPS, _STEPS
    ),
    st.builds(first_step, _SECONDS, _STEPS),
    st.builds(lambda a, b, n: save(min(a, b), max(a, b), n), _SECONDS, _SECONDS, _STEPS),
    st.builds(lambda a, b, n: save(a, b, n, failed="x", stall_s=9.0), _SECONDS, _SECONDS, _STEPS),
    st.builds(restored, _SECONDS, _STEPS),
    st.builds(failure, _SECONDS, st.sampled_from([None, "worker 0", "worker 1"])),
    st.builds(restart, _SECONDS, _STEPS),
    st.builds(notice, _SECONDS),
    st.builds(end, _SECONDS, st.integers(0, 1)),
)
_TASKS = st.sampled_from(["worker 0", "worker 1", "chief 0", "launcher 0", "evaluator 0"])
_PROCESSES = st.builds(
    lambda task, start_s, events: process(task, start_s, *events),
    _TASKS,
    _SECONDS,
    st.lists(_EVENTS, max_size=8),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(_PROCESSES, min_size=1, max_size=5))
def test_parts_sum_to_the_whole_whatever_was_written(processes) -> None:
    account = account_of(*processes)
    assert set(account.time_s) == set(CAUSES)
    assert sum(account.time_s.values()) == pytest.approx(account.whole_s, abs=1e-6)
    assert min(account.time_s.values()) >= 0
    edges = [0.0, *(span.end_s for span in account.spans)]
    assert [span.begin_s for span in account.spans] == edges[:-1]
    assert edges[-1] == pytest.approx(account.whole_s)
    assert all(one.cause != two.cause for one, two in itertools.pairwise(account.spans))
    assert 0 <= account.num_steps <= 101
    assert all(one.detect_s is None or one.detect_s >= 0 for one in account.failures)
    assert all(one.resume_s is None or one.resume_s > 0 for one in account.failures)


@st.composite
def _gang_runs(draw: Any) -> tuple[Any, dict[str, float], list[tuple[float, float]]]:
    """Attempts one after the other, and what each second was for, noted while it passes.

    A step takes a second, each attempt begins at a saved step, and all but the last die.
    """
    num_workers = draw(st.integers(1, 3))
    processes, now, saved = [], 0, 0
    seconds: dict[str, float] = dict.fromkeys(CAUSES, 0)
    failures: list[tuple[float, float]] = []
    num_attempts = draw(st.integers(1, 4))
    for attempt in range(num_attempts):
        start, ready = now, now + draw(st.integers(1, 9))
        num_steps = draw(st.integers(2, 12))
        done = ready + num_steps - 1
        line = draw(st.integers(1, num_steps - 1))
        lines = [restored(start, saved), first_step(ready, saved + 1)]
        for first in range(1, num_steps, line):
            last = min(num_steps, first + line)
            lines.append(
                steps(ready + first - 1, ready + last - 1, saved + first + 1, saved + last)
            )
        seconds["starting" if attempt == 0 else "restarting"] += ready - start
        if failures:
            failures[-1] = (failures[-1][0], failures[-1][1] + ready - start)
        kept, tail = num_steps, [end(done)]
        if attempt < num_attempts - 1:
            kept = draw(st.integers(0, num_steps))
            detect, pause = draw(st.integers(1, 9)), draw(st.integers(1, 9))
            tail = [failure(done + detect, "worker 9"), end(done + detect, 1)]
            seconds["detecting"] += detect
            seconds["restarting"] += pause
            failures.append((detect, pause))
            now = done + detect + pause
        # The first step's second belongs to the start.
        seconds["useful"] += max(0, kept - 1)
        seconds["repeated"] += num_steps - max(1, kept)
        saved += kept
        processes += [
            process(f"worker {index}", start, *lines, *tail, attempt=attempt)
            for index in range(num_workers)
        ]
    return run(*processes), seconds, failures


@settings(max_examples=150, deadline=None)
@given(_gang_runs())
def test_generated_run_is_counted_as_its_generator_has(generated) -> None:
    events, seconds, failures = generated
    account = account_for(events)
    assert account.time_s == pytest.approx(seconds, abs=1e-6)
    assert len(account.failures) == len(failures)
    for one, expected in zip(account.failures, failures, strict=True):
        assert (one.detect_s, one.resume_s) == pytest.approx(expected)

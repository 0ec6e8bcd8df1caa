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


def test_run_without_failures() -> None:
    lines = (first_step(10, 1), steps(10, 20, 2, 11), steps(20, 30, 12, 21), end(32))
    account = account_of(process("worker 0", 0, *lines), process("worker 1", 1, *lines))
    assert parts(account) == {"starting": 10, "useful": 20, "waiting": 2}
    assert (account.begin_s, account.whole_s) == (EPOCH_S, 32)
    assert account.goodput == pytest.approx(20 / 32)
    assert (account.num_steps, account.num_repeated, account.failures) == (21, 0, ())
    assert account.is_over


def test_what_the_launcher_does_before_the_first_task_is_starting() -> None:
    """It may load JAX for all; the workers begin 3 and 4 seconds after it."""
    lines = (first_step(10, 1), steps(10, 20, 2, 11), end(20))
    account = account_of(
        process("launcher 0", 0, end(20)),
        process("worker 0", 3, *lines),
        process("worker 1", 4, *lines),
    )
    assert parts(account) == {"starting": 10, "useful": 10}


def test_restart_of_all_from_a_checkpoint() -> None:
    account = account_for(gang_restart())
    assert parts(account) == {
        "starting": 10,
        "useful": 20 + 20,
        "repeated": 10,
        "detecting": 5,
        "restarting": 13,
    }
    assert times(account) == [(45, 5, 13)]
    assert account.failures[0].what == "worker 1 lost"
    assert account.failures[0].silence_s == 4.5
    assert (account.num_steps, account.num_repeated) == (42, 10)


def test_processes_that_all_die_without_a_word() -> None:
    """The failure is not reported, and there is no launcher: the next start implies it."""
    after = (first_step(30, 1), end(31))
    account = account_of(
        process("worker 0", 0, *TO_STEP_9),
        process("worker 1", 0, *TO_STEP_9),
        process("worker 0", 15, *after),
        process("worker 1", 16, *after),
    )
    assert parts(account) == {
        "starting": 2,
        "repeated": 8,
        "detecting": 5,
        "restarting": 15,
        "waiting": 1,
    }
    assert times(account) == [(15, 5, 15)]
    assert account.failures[0].what == "worker 0 exited without reporting"
    assert (account.num_steps, account.num_repeated) == (1, 9)


def test_saves_that_training_waits_for_and_one_behind_it() -> None:
    account = account_of(
        process(
            *("worker 0", 0, first_step(1, 1), steps(1, 5, 2, 5), save(5, 8, 5)),
            *(steps(8, 18, 6, 15, busy=9.5), save(10, 16, 8, stall_s=0.5), end(18)),
        )
    )
    assert parts(account) == {"starting": 1, "useful": 4 + 9.5, "saving": 3.5}


def test_failure_during_a_save() -> None:
    """The save that was not finished is time in which the failure was not known."""
    before = (first_step(1, 1), steps(1, 5, 2, 5))
    account = account_of(
        process(
            *("worker 0", 0, *before, save(5, 11, 5, failed="worker 1 is gone")),
            failure(11, "worker 1"),
        ),
        process("worker 1", 0, *before, save(5, 30, 5)[0]),
        process("worker 0", 12, restored(13, 0), first_step(14, 1), end(14)),
        process("worker 1", 12, restored(13, 0), first_step(14, 1), end(14)),
    )
    assert parts(account) == {"starting": 1, "repeated": 4, "detecting": 6, "restarting": 3}
    assert times(account) == [(11, 6, 3)]


def test_save_that_failed_and_training_goes_on() -> None:
    lines = (first_step(1, 1), save(1, 3, 1, failed="disk full"), steps(3, 5, 2, 3), end(5))
    account = account_of(process("worker 0", 0, *lines))
    assert parts(account) == {"starting": 1, "saving": 2, "useful": 2}


def test_time_between_the_calls_is_waiting() -> None:
    """The slowest counts: the others wait for it inside their step."""
    account = account_of(
        process("worker 0", 0, first_step(1, 1), steps(1, 11, 2, 6, busy=10), end(14)),
        process("worker 1", 0, first_step(1, 1), steps(1, 11, 2, 6, busy=4), end(14)),
    )
    assert parts(account) == {"starting": 1, "useful": 4, "waiting": 6 + 3}


def test_state_kept_in_memory_is_saving() -> None:
    """Also of steps that are lost."""
    account = account_of(
        process(
            *("worker 0", 0, first_step(1, 1), steps(1, 11, 2, 11, busy=7, keeping=2)),
            *(restored(12, 6), first_step(13, 7), end(13)),
        )
    )
    assert parts(account) == pytest.approx(
        {"starting": 1, "useful": 3.5, "repeated": 3.5, "saving": 2, "waiting": 2, "restarting": 1}
    )


def test_no_more_is_kept_than_there_was_time() -> None:
    account = account_of(
        process("worker 0", 0, first_step(1, 1), steps(1, 3, 2, 3, busy=1.5, keeping=9), end(3))
    )
    assert parts(account) == {"starting": 1, "useful": 1.5, "saving": 0.5}


def test_run_that_goes_on_counts_until_its_last_event() -> None:
    account = account_of(process("worker 0", 0, first_step(1, 1), steps(1, 11, 2, 6)))
    assert account.whole_s == 11
    assert not account.is_over


def test_others_go_on_while_one_restarts() -> None:
    """Elastic: worker 1 is away from second 20 to 50, and worker 0 pauses for one second."""
    account = account_of(
        process(
            *("worker 0", 0, first_step(10, 1), steps(10, 20, 2, 11), failure(20.5, "worker 1")),
            *(restored(20.75, 11, "memory"), first_step(21, 12), steps(21, 50, 13, 41)),
            *(steps(50, 60, 42, 51), end(60)),
        ),
        process("worker 1", 0, first_step(10, 1), steps(10, 20, 2, 11)),
        process(
            *("worker 1", 30, restored(50, 41, "memory"), first_step(51, 42)),
            *(steps(51, 60, 43, 51), end(60)),
            attempt=1,
        ),
        process("launcher 0", 0, failure(22, "worker 1"), restart(29, 1)),
    )
    assert times(account) == [(20.5, 0.5, 0.5)]
    assert parts(account) == {
        "starting": 10,
        "useful": 10 + 39,
        "detecting": 0.5,
        "restarting": 0.5,
    }
    assert (account.num_steps, account.num_repeated) == (51, 0)


def test_going_back_twice_counts_what_was_lost_each_time() -> None:
    account = account_of(
        process(
            *("worker 0", 0, first_step(1, 1), steps(1, 10, 2, 10), restored(11, 5)),
            *(first_step(12, 6), steps(12, 15, 7, 9), restored(16, 5), first_step(17, 6)),
            *(steps(17, 20, 7, 9), end(20)),
        )
    )
    assert (account.num_steps, account.num_repeated) == (9, 5 + 4)
    assert parts(account) == {
        "starting": 1,
        "useful": 4 + 3,
        "repeated": 5 + 3,
        "restarting": 2,
        "waiting": 2,
    }


def test_two_trainings_in_one_folder() -> None:
    account = account_of(
        process("worker 0", 0, first_step(1, 1), steps(1, 10, 2, 10), end(11)),
        process("worker 0", 20, restored(21, 10), first_step(22, 11), steps(22, 30, 12, 19)),
    )
    assert parts(account) == {"starting": 1 + 2, "useful": 9 + 8, "waiting": 10}
    assert account.failures == ()


def test_evaluators_and_servers_are_not_of_the_group() -> None:
    account = account_of(
        process("worker 0", 0, first_step(1, 1), steps(1, 10, 2, 10), end(10)),
        process("evaluator 0", 0, restored(5, 3), end(70, 1)),
        process("ps 0", 0, restored(6, 2), end(80, 143)),
    )
    assert (account.whole_s, account.failures, account.num_repeated) == (10, (), 0)
    assert parts(account) == {"starting": 1, "useful": 9}
    assert account.num_processes == 3


def test_only_a_start() -> None:
    account = account_of(process("worker 0", 0))
    assert (account.whole_s, account.goodput, parts(account)) == (0, 0, {})


def test_going_back_further_the_second_time() -> None:
    account = account_of(
        process(
            *("worker 0", 0, first_step(1, 1), steps(1, 10, 2, 10), restored(11, 8)),
            *(first_step(12, 9), steps(12, 15, 10, 12), restored(16, 2), first_step(17, 3)),
            end(17),
        )
    )
    assert (account.num_steps, account.num_repeated) == (3, 2 + 10)
    assert account.time_s["useful"] == pytest.approx(1)
    assert account.time_s["repeated"] == pytest.approx(8 + 3)


def test_steps_are_lost_as_soon_as_an_older_state_is_restored() -> None:
    lines = (first_step(1, 1), steps(1, 10, 2, 10), restored(12, 6))
    account = account_of(process("worker 0", 0, *lines))
    assert parts(account) == {"starting": 1, "useful": 5, "repeated": 4, "waiting": 2}
    assert (account.num_steps, account.num_repeated) == (6, 4)


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


# Failure detection: first report, duplicate reports, detection and recovery times.


def test_restart_without_any_report_counts_as_failure() -> None:
    account = account_of(
        process("launcher 0", 0, restart(12, 1)),
        process("worker 0", 0, *TO_STEP_9),
        process("worker 0", 14, first_step(20, 10), end(20)),
    )
    assert times(account) == [(12, 2, 8)]
    assert account.failures[0].what == "restart 1: worker 1 failed"
    assert parts(account) == {"starting": 2, "useful": 8, "detecting": 2, "restarting": 8}


def test_second_failure_before_a_step_was_done() -> None:
    account = account_of(
        process("worker 0", 0, *TO_STEP_9, failure(13, "worker 1"), end(14, 1)),
        process("worker 0", 15, restored(17, 9), failure(20, "worker 2", silence_s=1.5)),
        process("worker 0", 22, restored(24, 9), first_step(30, 10), end(30)),
    )
    assert times(account) == [(13, 3, 17), (20, 1.5, 10)]
    assert parts(account) == {"starting": 2, "useful": 8, "detecting": 3, "restarting": 17}
    assert account.num_repeated == 0


def test_failure_that_several_tell_of_is_one() -> None:
    account = account_of(
        process("launcher 0", 0, failure(14, "worker 2"), restart(15, 1)),
        process("worker 0", 0, *TO_STEP_9, failure(12, "worker 2"), end(12.5, 1)),
        process("worker 1", 0, *TO_STEP_9, failure(13, "worker 3"), end(13.5, 1)),
        process("worker 0", 16, first_step(18, 10), end(18)),
    )
    assert times(account) == [(12, 2, 6)]


def test_failure_before_the_first_step() -> None:
    account = account_of(
        process("worker 0", 0, failure(4, "worker 1"), end(5, 1)),
        process("worker 0", 6, first_step(9, 1), steps(9, 10, 2, 2), end(10)),
    )
    assert times(account) == [(4, None, 5)]
    assert parts(account) == {"starting": 4, "restarting": 5, "useful": 1}


def test_failure_for_good_is_not_resumed() -> None:
    lines = (*TO_STEP_9, failure(12, "worker 1"), end(13, 1))
    account = account_of(process("worker 0", 0, *lines))
    assert times(account) == [(12, 2, None)]
    assert parts(account) == {"starting": 2, "useful": 8, "detecting": 2, "restarting": 1}


def test_saved_checkpoint_is_a_sign_of_life() -> None:
    lines = (first_step(1, 1), steps(1, 5, 2, 5), save(5, 9, 5), failure(11, "worker 1"))
    account = account_of(process("worker 0", 0, *lines, first_step(12, 6)))
    assert parts(account) == {
        "starting": 1,
        "useful": 4,
        "saving": 4,
        "detecting": 2,
        "restarting": 1,
    }
    assert times(account) == [(11, 2, 1)]


def test_failure_in_the_middle_of_steps_put_together() -> None:
    """Only the launcher has noticed: a step a second is done before, through it and after."""
    account = account_of(
        process("launcher 0", 0, failure(14.25, "worker 1")),
        process("worker 0", 0, first_step(10, 1), steps(10, 20, 2, 11), end(20)),
    )
    assert times(account) == [(14.25, 0.25, 0.75)]
    assert parts(account) == {"starting": 10, "useful": 10}


def test_preemption_is_reported_by_the_end() -> None:
    lines = (first_step(1, 1), steps(1, 10, 2, 10), notice(9.5), save(10, 12, 10), end(12, 42))
    account = account_of(
        process("worker 0", 0, *lines),
        process("worker 0", 20, restored(22, 10), first_step(25, 11), end(25)),
    )
    assert parts(account) == {"starting": 1, "useful": 9, "saving": 2, "restarting": 13}
    assert times(account) == [(12, 0, 13)]
    assert account.failures[0].what == "worker 0: SIGTERM"


def test_second_failure_of_those_that_go_on_in_memory() -> None:
    """Both are reported by a process that started before the first one."""
    lines = (*TO_STEP_9, failure(11, "worker 1"))
    more = (restored(12, 9, "memory"), failure(14, "worker 2"), restored(15, 9, "memory"))
    account = account_of(process("worker 0", 0, *lines, *more, first_step(16, 10), end(16)))
    assert times(account) == [(11, 1, 5), (14, None, 2)]


def test_second_failure_reported_by_the_launcher_only() -> None:
    account = account_of(
        process("launcher 0", 0, failure(11), restart(12, 1), failure(14), restart(15, 2)),
        process("worker 0", 0, *TO_STEP_9),
        process("worker 0", 13),
        process("worker 0", 16, restored(17, 9), first_step(20, 10), end(20)),
    )
    assert times(account) == [(11, 1, 9), (14, None, 6)]


def test_last_words_after_the_failure_make_no_second_one() -> None:
    """Worker 1 gives up its save after worker 0 has reported."""
    account = account_of(
        process("worker 0", 0, *TO_STEP_9, failure(12, "worker 2"), end(12, 1)),
        process("worker 1", 0, *TO_STEP_9, save(10, 13, 9, failed="worker 2 is gone")),
        process("worker 1", 14, first_step(20, 10), end(20)),
        process("worker 0", 15, first_step(20, 10), end(20)),
    )
    assert times(account) == [(12, 2, 8)]


def test_restarted_launcher_is_not_a_failure() -> None:
    account = account_of(
        process("launcher 0", 0),
        process("worker 0", 0, first_step(2, 1), end(2)),
        process("launcher 0", 5),
        process("worker 0", 6, first_step(8, 2), end(8)),
    )
    assert account.failures == ()


def test_steps_of_the_first_call_are_done_at_its_end() -> None:
    account = account_of(
        process("launcher 0", 0, failure(5, "worker 1")),
        process("worker 0", 0, steps(0, 10, 1, 10), end(10)),
    )
    assert times(account) == [(5, None, 5)]


def test_median_of_an_even_number_lies_between() -> None:
    lines = (
        *(first_step(1, 1), steps(1, 10, 2, 10), failure(11), first_step(12, 11)),
        *(steps(12, 20, 12, 19), failure(24), first_step(31, 20)),
    )
    values = account_of(process("worker 0", 0, *lines)).as_dict()
    assert values["time_to_detect_s"] == {"median": 2.5, "worst": 4}
    assert values["time_to_resume_s"] == {"median": 4, "worst": 7}


def test_that_a_process_has_gone_is_its_own_last_word() -> None:
    """Another process may finish one more step before the launcher reports the loss."""
    account = account_of(
        process("launcher 0", 0, failure(12, "worker 1"), restart(13, 1)),
        process("worker 0", 0, *TO_STEP_9, steps(10, 11, 10, 10)),
        process("worker 1", 0, *TO_STEP_9, end(10.5, 1)),
        process("worker 0", 14, first_step(16, 11), end(16)),
    )
    assert times(account) == [(10.5, 0.5, 0.5)]


def test_each_of_many_failures_has_its_own_last_checkpoint_and_next_step() -> None:
    events = [first_step(2, 1)]
    for index in range(300):
        at_s = 10.0 * index
        events += [save(at_s + 3, at_s + 4, 1 + index), failure(at_s + 6, "worker 7")]
        events += [restored(at_s + 7, 1 + index), first_step(at_s + 8, 2 + index)]
    account = account_of(process("worker 0", 0, *events), process("worker 7", 0))
    # Only the first one counts: the task that is lost never starts again.
    assert times(account) == [(6, 2, 2)]
    again = [process("worker 7", 10.0 * index + 7) for index in range(300)]
    account = account_of(process("worker 0", 0, *events), process("worker 7", 0), *again)
    assert times(account)[:3] == [(6, 2, 2), (16, 2, 2), (26, 2, 2)]
    assert len(account.failures) == 300

"""Failure detection: first report, duplicate reports, detection and recovery times."""

from __future__ import annotations

from stratagem.observe.goodput.account import account_for
from tests.unit.observe.goodput.runs import (
    end,
    failure,
    first_step,
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


def test_restart_without_any_report_counts_as_failure() -> None:
    before = (first_step(2, 1), steps(2, 10, 2, 9))
    account = account_for(
        run(
            process("launcher 0", 0, restart(12, 1)),
            process("worker 0", 0, *before),
            process("worker 0", 14, first_step(20, 10), end(20)),
        )
    )
    assert times(account) == [(12, 2, 8)]
    assert account.failures[0].what == "restart 1: worker 1 failed"
    assert parts(account) == {"starting": 2, "useful": 8, "detecting": 2, "restarting": 8}


def test_second_failure_before_a_step_was_done() -> None:
    before = (first_step(2, 1), steps(2, 10, 2, 9))
    account = account_for(
        run(
            process("worker 0", 0, *before, failure(13, "worker 1"), end(14, 1)),
            process("worker 0", 15, restored(17, 9), failure(20, "worker 2", silence_s=1.5)),
            process("worker 0", 22, restored(24, 9), first_step(30, 10), end(30)),
        )
    )
    assert times(account) == [(13, 3, 17), (20, 1.5, 10)]
    assert parts(account) == {"starting": 2, "useful": 8, "detecting": 3, "restarting": 17}
    assert account.num_repeated == 0


def test_failure_that_several_tell_of_is_one() -> None:
    before = (first_step(2, 1), steps(2, 10, 2, 9))
    account = account_for(
        run(
            process("launcher 0", 0, failure(14, "worker 2"), restart(15, 1)),
            process("worker 0", 0, *before, failure(12, "worker 2"), end(12.5, 1)),
            process("worker 1", 0, *before, failure(13, "worker 3"), end(13.5, 1)),
            process("worker 0", 16, first_step(18, 10), end(18)),
        )
    )
    assert times(account) == [(12, 2, 6)]


def test_failure_before_the_first_step() -> None:
    account = account_for(
        run(
            process("worker 0", 0, failure(4, "worker 1"), end(5, 1)),
            process("worker 0", 6, first_step(9, 1), steps(9, 10, 2, 2), end(10)),
        )
    )
    assert times(account) == [(4, None, 5)]
    assert parts(account) == {"starting": 4, "restarting": 5, "useful": 1}


def test_failure_for_good_is_not_resumed() -> None:
    lines = (first_step(2, 1), steps(2, 10, 2, 9), failure(12, "worker 1"), end(13, 1))
    account = account_for(run(process("worker 0", 0, *lines)))
    assert times(account) == [(12, 2, None)]
    assert parts(account) == {"starting": 2, "useful": 8, "detecting": 2, "restarting": 1}


def test_saved_checkpoint_is_a_sign_of_life() -> None:
    lines = (first_step(1, 1), steps(1, 5, 2, 5), save(5, 9, 5), failure(11, "worker 1"))
    account = account_for(run(process("worker 0", 0, *lines, first_step(12, 6))))
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
    account = account_for(
        run(
            process("launcher 0", 0, failure(14.25, "worker 1")),
            process("worker 0", 0, first_step(10, 1), steps(10, 20, 2, 11), end(20)),
        )
    )
    assert times(account) == [(14.25, 0.25, 0.75)]
    assert parts(account) == {"starting": 10, "useful": 10}


def test_preemption_is_reported_by_the_end() -> None:
    lines = (first_step(1, 1), steps(1, 10, 2, 10), notice(9.5), save(10, 12, 10), end(12, 42))
    account = account_for(
        run(
            process("worker 0", 0, *lines),
            process("worker 0", 20, restored(22, 10), first_step(25, 11), end(25)),
        )
    )
    assert parts(account) == {"starting": 1, "useful": 9, "saving": 2, "restarting": 13}
    assert times(account) == [(12, 0, 13)]
    assert account.failures[0].what == "worker 0: SIGTERM"


def test_second_failure_of_those_that_go_on_in_memory() -> None:
    """Both are reported by a process that started before the first one."""
    lines = (first_step(2, 1), steps(2, 10, 2, 9), failure(11, "worker 1"))
    more = (restored(12, 9, "memory"), failure(14, "worker 2"), restored(15, 9, "memory"))
    account = account_for(run(process("worker 0", 0, *lines, *more, first_step(16, 10), end(16))))
    assert times(account) == [(11, 1, 5), (14, None, 2)]


def test_second_failure_reported_by_the_launcher_only() -> None:
    account = account_for(
        run(
            process("launcher 0", 0, failure(11), restart(12, 1), failure(14), restart(15, 2)),
            process("worker 0", 0, first_step(2, 1), steps(2, 10, 2, 9)),
            process("worker 0", 13),
            process("worker 0", 16, restored(17, 9), first_step(20, 10), end(20)),
        )
    )
    assert times(account) == [(11, 1, 9), (14, None, 6)]


def test_last_words_after_the_failure_make_no_second_one() -> None:
    """Worker 1 gives up its save after worker 0 has reported."""
    before = (first_step(2, 1), steps(2, 10, 2, 9))
    account = account_for(
        run(
            process("worker 0", 0, *before, failure(12, "worker 2"), end(12, 1)),
            process("worker 1", 0, *before, save(10, 13, 9, failed="worker 2 is gone")),
            process("worker 1", 14, first_step(20, 10), end(20)),
            process("worker 0", 15, first_step(20, 10), end(20)),
        )
    )
    assert times(account) == [(12, 2, 8)]


def test_restarted_launcher_is_not_a_failure() -> None:
    account = account_for(
        run(
            process("launcher 0", 0),
            process("worker 0", 0, first_step(2, 1), end(2)),
            process("launcher 0", 5),
            process("worker 0", 6, first_step(8, 2), end(8)),
        )
    )
    assert account.failures == ()


def test_steps_of_the_first_call_are_done_at_its_end() -> None:
    account = account_for(
        run(
            process("launcher 0", 0, failure(5, "worker 1")),
            process("worker 0", 0, steps(0, 10, 1, 10), end(10)),
        )
    )
    assert times(account) == [(5, None, 5)]


def test_median_of_an_even_number_lies_between() -> None:
    lines = (
        *(first_step(1, 1), steps(1, 10, 2, 10), failure(11), first_step(12, 11)),
        *(steps(12, 20, 12, 19), failure(24), first_step(31, 20)),
    )
    values = account_for(run(process("worker 0", 0, *lines))).as_dict()
    assert values["time_to_detect_s"] == {"median": 2.5, "worst": 4}
    assert values["time_to_resume_s"] == {"median": 4, "worst": 7}


def test_that_a_process_has_gone_is_its_own_last_word() -> None:
    """Another process may finish one more step before the launcher reports the loss."""
    before = (first_step(2, 1), steps(2, 10, 2, 9))
    account = account_for(
        run(
            process("launcher 0", 0, failure(12, "worker 1"), restart(13, 1)),
            process("worker 0", 0, *before, steps(10, 11, 10, 10)),
            process("worker 1", 0, *before, end(10.5, 1)),
            process("worker 0", 14, first_step(16, 11), end(16)),
        )
    )
    assert times(account) == [(10.5, 0.5, 0.5)]


def test_each_of_many_failures_has_its_own_last_checkpoint_and_next_step() -> None:
    events = [first_step(2, 1)]
    for index in range(300):
        at_s = 10.0 * index
        events += [save(at_s + 3, at_s + 4, 1 + index), failure(at_s + 6, "worker 7")]
        events += [restored(at_s + 7, 1 + index), first_step(at_s + 8, 2 + index)]
    account = account_for(run(process("worker 0", 0, *events), process("worker 7", 0)))
    # Only the first one counts: the task that is lost never starts again.
    assert times(account) == [(6, 2, 2)]
    again = [process("worker 7", 10.0 * index + 7) for index in range(300)]
    account = account_for(run(process("worker 0", 0, *events), process("worker 7", 0), *again))
    assert times(account)[:3] == [(6, 2, 2), (16, 2, 2), (26, 2, 2)]
    assert len(account.failures) == 300

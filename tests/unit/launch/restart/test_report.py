"""Messages of the launcher about failures and restarts."""

from __future__ import annotations

import dataclasses
import signal
from typing import Any

import pytest

from stratagem.group.verdict import Loss
from stratagem.launch.restart.policy import MAX_SHORT_STARTS, SHORT_S, RestartCount, WorkerRestarts
from stratagem.launch.restart.report import (
    CaughtSignals,
    failure_report,
    notice_report,
    stop_report,
)
from stratagem.launch.tasks.exit_status import ExitStatus, take_loss

WORDS = ("Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: nan")
CAUSE = ExitStatus(name="worker 2", returncode=1, at_s=1.0, lines=("step 1", *WORDS))
LOST = ExitStatus(name="worker 0", returncode=3, at_s=2.0)
STOPPED = ExitStatus(
    name="worker 1", returncode=-15, at_s=3.0, was_stopped=True, signals=frozenset({15})
)
DONE = ExitStatus(name="ps 0", returncode=0, at_s=0.5)


def test_failure_is_reported_with_its_cause_and_what_became_of_the_others() -> None:
    assert failure_report(CAUSE, [LOST, STOPPED, CAUSE, DONE], log_dir="logs") == [
        "worker 2 failed first: exit code 1.",
        "Its last lines:",
        *(f"    {line}" for line in WORDS),
        "Failed after it: worker 0 (exit code 3).",
        "Stopped: worker 1 (killed by SIGTERM).",
        "Had ended: ps 0 (exit code 0).",
        "All output: logs",
    ]


def test_tasks_that_saved_and_left_are_not_called_failed() -> None:
    statuses = [ExitStatus(name="worker 0", returncode=42, at_s=1.0), STOPPED]
    assert stop_report(statuses[0], statuses[:1]) == [
        "worker 0 saved and left after notice (exit code 42): stopping the others."
    ]
    left = ["Saved and left after notice: worker 0 (exit code 42), worker 1 (killed by SIGTERM)."]
    assert notice_report(statuses, RestartCount(), RestartCount(notices=1, short_starts=2)) == left
    short = [
        "This happened within 10 s of the start 3 times or more in a row, so it counts as a "
        "failure."
    ]
    assert (
        notice_report(statuses, RestartCount(), RestartCount(failures=1, short_starts=3))
        == left + short
    )
    assert notice_report(statuses, RestartCount(), None) == left + short


# The error of worker 0 when worker 1 is stopped (SIGSTOP), and when the disk of worker 1 is full.
SILENT = ExitStatus(
    name="worker 0",
    returncode=1,
    at_s=1.0,
    lines=(
        '  File "train.py", line 3 in <module>',
        "stratagem.errors.UnavailableError: worker 1 (a:1) has not answered for 4 s; it was last in"
        " shared program 11 (train). worker 0 (b:1) is in shared program 29 (train).",
        "Expected a heartbeat at least every 4 s (STRATAGEM_PEER_TIMEOUT_S).",
    ),
    loss=Loss(
        task="worker 1",
        how="has not answered for 4 s",
        step=11,
        reported_by="worker 0",
        message="worker 1 (a:1) has not answered for 4 s; it was last in shared program 11 (train)."
        " worker 0 (b:1) is in shared program 29 (train).\nExpected a heartbeat",
    ),
)
TOLD = dataclasses.replace(
    SILENT,
    lines=(
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        "stratagem.errors.UnavailableError: chief (a:1) ended with an error in your code:",
        "Traceback (most recent call last):",
        "OSError: [Errno 28] No space left on device",
    ),
    loss=Loss(
        task="chief 0",
        how="ended with an error",
        step=0,
        reported_by="worker 0",
        message="chief (a:1) ended with an error in your code:\nTraceback (most recent call last):",
    ),
)
KILLED = ExitStatus(
    name="worker 1", returncode=-9, at_s=9.0, was_stopped=True, signals=frozenset({15, 9})
)


def test_headline_names_the_task_that_others_have_lost() -> None:
    why = "it has not answered for 4 s, as worker 0 reported (exit code 1)"
    assert failure_report(SILENT, [SILENT, KILLED]) == [
        f"worker 1 failed first: {why}.",
        "Last lines of worker 0:",
        *(f"    {line}" for line in SILENT.lines),
        "Stopped: worker 1 (killed by SIGKILL).",
    ]
    assert stop_report(SILENT, [SILENT]) == [
        "worker 1 has not answered for 4 s, and so worker 0 failed (exit code 1): stopping the "
        "others."
    ]


def test_error_of_another_task_is_not_taken_for_an_own_one() -> None:
    shown = dataclasses.replace(TOLD, was_shown=True)
    assert failure_report(shown, [shown]) == [
        "chief 0 failed first: it ended with an error, as worker 0 reported (exit code 1).",
        "Last lines of worker 0:",
        *(f"    {line}" for line in TOLD.lines[2:]),
    ]


def test_record_is_read_once_and_half_a_record_counts_as_none(tmp_path) -> None:
    path = tmp_path / "worker-0.json"
    text = TOLD.loss.to_json()
    for num_chars in range(len(text)):
        path.write_text(text[:num_chars])
        assert take_loss(str(path)) is None
        assert not path.exists()
    for other in ("[]", "null", "{}", '{"task": "worker 1"}', "\udcff"):
        path.write_text(other, errors="surrogateescape")
        assert take_loss(str(path)) is None
    path.write_text(text)
    assert take_loss(str(path)) == TOLD.loss
    assert take_loss(str(path)) is None
    assert take_loss(None) is None


def test_task_that_caught_the_error_of_a_loss_has_failed_only_if_it_says_so() -> None:
    for returncode, name in ((0, "worker 0"), (42, "worker 0"), (1, "chief 0")):
        assert dataclasses.replace(TOLD, returncode=returncode).culprit == name


# Restarts of single workers: how many, and when.


def _always(worker: int) -> bool:
    return True


def _loss(restarts: WorkerRestarts, worker: int = 1, *, ran_s: float = 60.0, **loss: Any) -> str:
    return restarts.note_loss(worker, f"worker {worker}", ran_s=ran_s, now_s=100, **loss)


def test_a_worker_that_ran_for_a_while_starts_at_once_when_nothing_of_it_is_left() -> None:
    restarts = WorkerRestarts(3)
    assert _loss(restarts) == "Starting worker 1 again: restart 1 of 3."
    assert restarts.take_due(100, lambda worker: False) == []
    assert restarts.take_due(100, _always) == [1]
    assert restarts.take_due(100, _always) == []


def test_one_that_fails_early_waits_longer_each_time() -> None:
    restarts = WorkerRestarts(100)
    first, *texts = [_loss(restarts, ran_s=1) for _ in range(9)]
    assert " after " not in first
    assert [text.split(" after ")[1].split(" s:")[0] for text in texts] == [
        *("0.5", "1", "2", "4", "8", "16", "30", "30")
    ]
    assert restarts.take_due(129, _always) == []
    assert restarts.take_due(130, _always) == [1]
    assert " after " not in _loss(restarts, ran_s=11)  # it has run
    assert " after 0.5 s: " in _loss(restarts, ran_s=1)
    assert " after " not in _loss(restarts, worker=2, ran_s=1)


def test_worker_that_saved_and_left_after_a_while_has_a_budget_of_its_own() -> None:
    restarts = WorkerRestarts(0, max_preemptions=2)
    for _ in range(2):
        text = _loss(restarts, saved_and_left=True)
        assert text == "Starting worker 1 again; this does not count as a failure."
        assert restarts.take_due(100, _always) == [1]
    text = _loss(restarts, saved_and_left=True)
    assert text == "Not starting worker 1 again: no restart after a preemption is left."
    assert restarts.take_due(100, _always) == []
    # A notice that never ends.
    text = _loss(WorkerRestarts(3), ran_s=1, saved_and_left=True)
    assert text == "Starting worker 1 again: restart 1 of 3."


def test_restarts_of_all_workers_have_one_limit_which_is_reported_once() -> None:
    restarts = WorkerRestarts(2)
    assert [_loss(restarts, worker) for worker in range(4)] == [
        "Starting worker 0 again: restart 1 of 2.",
        "Starting worker 1 again: restart 2 of 2.",
        "Not starting worker 2 again: no restart of 2 is left.",
        "",
    ]
    assert restarts.take_due(100, _always) == [0, 1]


# Signals are queued while tasks run, and handlers restored afterwards.


@pytest.fixture
def handlers():
    """A handler for each signal, which would notice it; put back afterwards."""
    seen: list[int] = []
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    before = {signal.Signals[name]: signal.getsignal(signal.Signals[name]) for name in names}
    for signum in before:
        signal.signal(signum, lambda signum, _: seen.append(signum))
    yield seen
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_kept_in_order(handlers, ending) -> None:
    with CaughtSignals() as caught:
        for signum in (signal.SIGUSR2, ending, signal.SIGUSR1):
            assert caught.ending is (ending if signum == signal.SIGUSR1 else None)
            signal.raise_signal(signum)
        assert caught.take() == [signal.SIGUSR2, ending, signal.SIGUSR1]
        assert caught.take() == []
        assert handlers == []
    signal.raise_signal(ending)
    assert handlers == [ending]


# Restarts for tables of exit statuses.

LONG_S = SHORT_S


LEFT_3 = RestartCount(notices=3, preemptions=1)


def statuses(*returncodes: int, lines: tuple[str, ...] = ()) -> list[ExitStatus]:
    return [
        ExitStatus(name=f"worker {index}", returncode=returncode, at_s=1.0, lines=lines)
        for index, returncode in enumerate(returncodes)
    ]


@pytest.mark.parametrize(
    ("before", "returncodes", "ran_s", "after"),
    [
        (RestartCount(), (0, 0), LONG_S, None),
        (RestartCount(), (0, 1), LONG_S, RestartCount(failures=1)),
        (RestartCount(failures=1), (-9, 0), 0.0, RestartCount(failures=2)),
        (RestartCount(failures=2), (-9, 0), LONG_S, None),
        # To leave with 42 is no failure, however often.
        (RestartCount(), (42, 42), LONG_S, RestartCount(notices=1, preemptions=1)),
        (
            RestartCount(failures=2, notices=7),
            (42, 0),
            LONG_S,
            RestartCount(failures=2, notices=8, preemptions=1),
        ),
        # Unless it is at once, and again, and again.
        (RestartCount(), (42,), 0.0, RestartCount(notices=1, preemptions=1, short_starts=1)),
        (
            RestartCount(notices=2, short_starts=MAX_SHORT_STARTS - 1),
            (42,),
            0.0,
            RestartCount(failures=1, notices=2, short_starts=MAX_SHORT_STARTS),
        ),
        (RestartCount(failures=2, short_starts=MAX_SHORT_STARTS), (42,), 0.0, None),
        # A start that was not short begins to count anew, and so does a failure.
        (
            RestartCount(notices=2, short_starts=2),
            (42,),
            LONG_S,
            RestartCount(notices=3, preemptions=1),
        ),
        (RestartCount(notices=2, short_starts=2), (1,), 0.0, RestartCount(failures=1, notices=2)),
    ],
)
def test_next_start(before, returncodes, ran_s, after) -> None:
    assert before.next(statuses(*returncodes), ran_s=ran_s, max_restarts=2) == after

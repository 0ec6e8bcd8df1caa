"""Messages of the launcher about failures and restarts."""

from __future__ import annotations

import dataclasses
import signal

from stratagem.launch.restart.restart_count import RestartCount
from stratagem.launch.restart.task_group import (
    end_summary,
    failure_report,
    notice_report,
    restart_report,
    signal_report,
    stop_report,
)
from stratagem.launch.tasks.exit_status import ExitStatus

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


def test_frames_that_are_on_the_screen_are_not_reported_again() -> None:
    shown = dataclasses.replace(CAUSE, was_shown=True)
    assert failure_report(shown, [shown])[1:] == ["Its last lines:", "    ValueError: nan"]


def test_what_there_is_nothing_of_is_left_out() -> None:
    silent = ExitStatus(name="worker 0", returncode=-9, at_s=1.0)
    assert failure_report(silent, [silent]) == ["worker 0 failed first: killed by SIGKILL."]


def test_signal_and_restart_are_reported() -> None:
    assert signal_report(signal.SIGTERM, [LOST, DONE]) == [
        "Ended after SIGTERM: worker 0 (exit code 3), ps 0 (exit code 0)."
    ]
    after = RestartCount(failures=1, notices=2)
    told = restart_report(RestartCount(notices=2), after, 3)
    assert told == ["Starting all tasks again: restart 1 of 3."]
    told = restart_report(RestartCount(failures=1, notices=1), after, 3)
    assert told == ["Starting all tasks again; this does not count as a failure."]


def test_tasks_that_saved_and_left_are_not_called_failed() -> None:
    statuses = [ExitStatus(name="worker 0", returncode=42, at_s=1.0), STOPPED]
    assert stop_report(statuses[0], statuses[:1]) == [
        "worker 0 saved and left after notice (exit code 42): stopping the others."
    ]
    left = ["Saved and left after notice: worker 0 (exit code 42), worker 1 (killed by SIGTERM)."]
    assert notice_report(statuses, RestartCount(notices=1, short_starts=2)) == left
    short = [
        "This happened within 10 s of the start 3 times or more in a row, so it counts as a "
        "failure."
    ]
    assert notice_report(statuses, RestartCount(failures=1, short_starts=3)) == left + short
    assert notice_report(statuses, None) == left + short


def test_task_that_failed_is_called_so() -> None:
    assert stop_report(LOST, [LOST]) == ["worker 0 failed (exit code 3): stopping the others."]


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
    assert end_summary(SILENT, None) == f"worker 1 failed first: {why}"
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

"""What is said at the end."""

from __future__ import annotations

import signal

from stratagem.launch.ends import TaskEnd
from stratagem.launch.report import failure_report, restart_report, signal_report

WORDS = ("Traceback (most recent call last):", '  File "train.py", line 3', "ValueError: nan")
CAUSE = TaskEnd(name="worker 2", returncode=1, at_s=1.0, lines=("step 1", *WORDS))
LOST = TaskEnd(name="worker 0", returncode=3, at_s=2.0)
STOPPED = TaskEnd(
    name="worker 1", returncode=-15, at_s=3.0, was_stopped=True, signals=frozenset({15})
)
DONE = TaskEnd(name="ps 0", returncode=0, at_s=0.5)


def test_failure_is_told_with_its_cause_and_what_became_of_the_others() -> None:
    assert failure_report(CAUSE, [LOST, STOPPED, CAUSE, DONE], log_dir="logs") == [
        "worker 2 failed first: exit code 1.",
        "Its last lines:",
        *(f"    {line}" for line in WORDS),
        "Failed after it: worker 0 (exit code 3).",
        "Stopped: worker 1 (killed by SIGTERM).",
        "Had ended: ps 0 (exit code 0).",
        "All output: logs",
    ]


def test_what_there_is_nothing_of_is_left_out() -> None:
    silent = TaskEnd(name="worker 0", returncode=-9, at_s=1.0)
    assert failure_report(silent, [silent]) == ["worker 0 failed first: killed by SIGKILL."]


def test_signal_and_restart_are_told() -> None:
    assert signal_report(signal.SIGTERM, [LOST, DONE]) == [
        "Ended after SIGTERM: worker 0 (exit code 3), ps 0 (exit code 0)."
    ]
    assert restart_report(1, 3) == ["Starting all tasks again: restart 1 of 3."]

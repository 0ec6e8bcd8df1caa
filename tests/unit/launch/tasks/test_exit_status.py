"""Exit statuses in numbers and in words."""

from __future__ import annotations

import subprocess

import pytest

from stratagem.launch.tasks.exit_status import ExitStatus, describe_exit, exit_code


@pytest.mark.parametrize("code", [0, 1, 3, 255])
def test_exit_code_stays(code) -> None:
    assert exit_code(code) == code
    assert describe_exit(code) == f"exit code {code}"


@pytest.mark.parametrize(("signum", "name"), [(9, "SIGKILL"), (11, "SIGSEGV"), (15, "SIGTERM")])
def test_signal_is_reported_as_a_shell_tells_it(signum, name) -> None:
    shell = subprocess.run(["sh", "-c", f"sh -c 'kill -{signum} $$'; exit $?"], check=False)
    assert exit_code(-signum) == shell.returncode
    assert describe_exit(-signum) == f"killed by {name}"


def test_signal_without_a_name_has_a_number() -> None:
    assert describe_exit(-40) == "killed by signal 40"


@pytest.mark.parametrize(
    ("returncode", "was_stopped", "signals", "failed"),
    [
        (0, False, set(), False),
        (0, True, {15}, False),
        (1, False, set(), True),
        (-9, False, set(), True),
        # Told to end, it may leave as it likes, but not by a signal of somebody else's.
        (1, True, {15}, False),
        (-15, True, {15}, False),
        (-9, True, {15, 9}, False),
        (-11, True, {15}, True),
        # A user's signal to all is no order of the launcher's.
        (-2, False, {2}, True),
    ],
)
def test_task_fails_by_itself_only(returncode, was_stopped, signals, failed) -> None:
    status = ExitStatus(
        name="worker 0",
        returncode=returncode,
        at_s=0.0,
        was_stopped=was_stopped,
        signals=frozenset(signals),
    )
    assert status.failed is failed

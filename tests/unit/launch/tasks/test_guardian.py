"""Processes left by a dead launcher, killed by its guardian."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.launch.tasks import guardian as guardian_module
from stratagem.launch.tasks.guardian import Guardian
from tests.unit.launch.waiting import is_running, until


@pytest.fixture
def groups():
    """Two processes, each in a group of its own."""
    processes = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2)]
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def guard(groups, *, forget: int | None = None) -> None:
    """Is told of the groups by a process that then ends without a word."""
    lines = "".join(f"+{process.pid}\n" for process in groups)
    lines += "" if forget is None else f"-{forget}\n"
    subprocess.run(
        [sys.executable, "-I", "-S", guardian_module.__file__],
        input=lines,
        text=True,
        check=True,
        timeout=60,
    )


def test_groups_of_a_launcher_that_has_died_are_killed(groups) -> None:
    guard(groups)
    assert [process.wait(60) for process in groups] == [-signal.SIGKILL] * 2


def test_group_that_has_ended_is_left_alone(groups) -> None:
    guard(groups, forget=groups[0].pid)
    assert groups[1].wait(60) == -signal.SIGKILL
    assert groups[0].poll() is None


def test_launcher_that_ends_well_leaves_no_guardian(groups) -> None:
    with Guardian() as guardian:
        for process in groups:
            guardian.watch(process.pid)
        pid = guardian.pid
        assert is_running(pid)
        for process in groups:
            guardian.forget(process.pid)
    assert not is_running(pid)
    assert [process.poll() for process in groups] == [None, None]


def test_guardian_that_was_stopped_holds_nobody_up(monkeypatch) -> None:
    monkeypatch.setattr(guardian_module, "_EXIT_S", 0.1)
    with Guardian() as guardian:
        os.kill(guardian.pid, signal.SIGSTOP)
    assert not is_running(guardian.pid)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_guardian_does_not_die_with_the_launcher(groups, signum) -> None:
    with Guardian() as guardian:
        assert os.getsid(guardian.pid) == guardian.pid
        until(lambda: _ignores(guardian.pid, signum))
        os.kill(guardian.pid, signum)
        guardian.watch(groups[0].pid)
    # It was told no more of the group, as when a launcher dies.
    assert groups[0].wait(60) == -signal.SIGKILL
    assert groups[1].poll() is None


def _ignores(pid: int, signum: int) -> bool:
    mask = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return mask is not None and bool(int(mask[1], 16) >> (signum - 1) & 1)


def test_guardian_that_was_killed_is_no_error(groups) -> None:
    with Guardian() as guardian:
        os.kill(guardian.pid, signal.SIGKILL)
        until(lambda: not is_running(guardian.pid))
        guardian.watch(groups[0].pid)
        guardian.forget(groups[0].pid)
    assert groups[0].poll() is None

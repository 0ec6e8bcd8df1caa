"""Process of one task and its children."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import plan_tasks
from stratagem.launch.tasks.task_process import TaskProcess
from tests.unit.launch.waiting import is_running, until


@pytest.fixture
def start():
    """Starts programs as tasks, and ends them."""
    started: list[TaskProcess] = []

    def start_one(*command: str, **base: str) -> TaskProcess:
        (plan,) = plan_tasks(LaunchOptions(), command, ports=[1], gpus=[], base=base)
        started.append(TaskProcess(plan, base))
        return started[-1]

    yield start_one
    for process in started:
        process.send(signal.SIGKILL)
        process.wait()
        process.close()


def output_of(process: TaskProcess) -> str:
    until(lambda: process.returncode() is not None)
    return process.read_all(process.streams[0]).decode()


def test_task_has_what_it_inherits_and_its_own_variables(start) -> None:
    program = (
        "import os; print(os.environ['OWN'], os.environ['TF_CONFIG'][:11], 'HOME' in os.environ)"
    )
    process = start(sys.executable, "-c", program, OWN="inherited")
    assert output_of(process) == 'inherited {"cluster": False\n'


def test_task_leads_a_session_of_its_own(start) -> None:
    process = start(
        sys.executable, "-c", "import os; print(os.getsid(0), os.getpgid(0), os.getppid())"
    )
    assert output_of(process) == f"{process.group} {process.group} {os.getpid()}\n"


def test_reading_never_waits(start) -> None:
    process = start("sh", "-c", "exec 2>&-; exec sleep 1000")
    stdout, stderr = process.streams
    until(lambda: process.read(stderr) == b"")
    assert process.read(stdout) is None
    assert process.read_all(stdout) == b""
    assert process.returncode() is None


def test_reading_all_ends_though_somebody_goes_on_writing(start) -> None:
    process = start("yes")
    read: list[bytes] = []
    until(lambda: read.append(process.read_all(process.streams[0])) or read[-1])
    assert set(read[-1].split(b"\n")) <= {b"y", b""}
    assert len(read[-1]) <= 2**20 + 2**16


def test_ended_task_is_gone_and_takes_no_signals(start) -> None:
    process = start("true")
    until(lambda: process.returncode() is not None)
    assert process.look_for_members()
    process.send(signal.SIGTERM)
    process.send(signal.SIGUSR1)
    assert process.returncode() == 0


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only /proc tells the dead apart")
def test_dead_that_nobody_has_waited_for_are_gone(start) -> None:
    """A task that nobody has asked about is such a one."""
    process = start("true")
    until(lambda: not is_running(process.group))
    os.killpg(process.group, 0)  # the system still lists it
    assert process.look_for_members()


def test_task_with_a_child_is_not_gone(start) -> None:
    process = start("sh", "-c", "sleep 1000 & echo $!")
    child = int(output_of(process))
    assert not process.look_for_members()
    os.kill(child, signal.SIGKILL)
    until(process.look_for_members)
    assert not is_running(child)

"""Search for the innermost object that cannot be pickled."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.launch.functions import (
    captured_values,
    dumps_without_state,
    find_unpicklable,
    live_kind,
)
from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import plan_tasks
from stratagem.launch.restart.task_group import TaskProcess
from stratagem.launch.tasks import guardian as guardian_module
from stratagem.launch.tasks import tied_process
from stratagem.launch.tasks.exit_status import ExitStatus, describe_exit, exit_code
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.tied_process import tied_command
from tests.unit.launch.waiting import is_running, until

LOCK = threading.Lock()


class Holder:
    def __init__(self, **members: Any) -> None:
        vars(self).update(members)


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (LOCK, "it"),
        ([1, {"a": (LOCK,)}], "it[1]['a'][0]"),
        (Holder(ok=1, inner=Holder(lock=LOCK)), "it.inner.lock"),
        ({"text": "abc", 7: LOCK}, "it[7]"),
    ],
    ids=["itself", "containers", "attributes", "keys"],
)
def test_innermost_object_is_found_with_its_place(value, place) -> None:
    found = find_unpicklable({"fine": 1, "it": value})
    assert found[0] == place
    assert found[1] is LOCK


def test_what_can_be_pickled_has_no_such_place() -> None:
    assert find_unpicklable({"a": [1, {"b": Holder(x=2)}], "f": lambda: 1}) is None
    assert captured_values(3) == {}  # pyright: ignore[reportArgumentType]


def _model() -> keras.Model:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: sg.OneDeviceStrategy("cpu:0"), "strategy"),
        (_model, "state"),
        (lambda: _model().layers[0], "state"),
        (lambda: keras.Variable(1.0), "state"),
        (lambda: keras.optimizers.SGD(), "state"),
        (lambda: keras.metrics.Mean(), "state"),
        (lambda: keras.layers.Dense(1), None),  # not built: a recipe
        (lambda: np.ones(2), None),
        (lambda: sg.ReduceOp.SUM, None),
        (lambda: sg.MirroredStrategy, None),  # the class
    ],
    ids=[
        *("strategy", "model", "layer", "variable", "optimizer", "metric", "layer not built"),
        *("array", "enum", "class"),
    ],
)
def test_what_belongs_to_a_process_stays_there(make, kind) -> None:
    value = make()
    assert live_kind(value) == kind
    if kind is None:
        pickle.loads(dumps_without_state([value]))
        return
    with pytest.raises(TypeError, match=f"A {type(value).__name__} belongs to this process"):
        dumps_without_state({"part": [value]})
    found = find_unpicklable({"it": [1, value]}, pickled=dumps_without_state)
    assert (found[0], found[1] is value) == ("it[1]", True)


# Process of one task and its children.


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


# Processes left by a dead launcher, killed by its guardian.


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


def test_groups_of_a_launcher_that_has_died_are_killed_and_others_left_alone(groups) -> None:
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


def test_guardian_that_was_stopped_or_killed_holds_nobody_up(monkeypatch, groups) -> None:
    monkeypatch.setattr(guardian_module, "_EXIT_S", 0.1)
    for signum in (signal.SIGSTOP, signal.SIGKILL):
        with Guardian() as guardian:
            os.kill(guardian.pid, signum)
            if signum == signal.SIGKILL:
                until(lambda pid=guardian.pid: not is_running(pid))
            guardian.watch(groups[0].pid)
            guardian.forget(groups[0].pid)
        assert not is_running(guardian.pid)
    assert groups[0].poll() is None


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


# Programs tied to the process that starts them.


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which signals are ignored")
def test_program_finds_arguments_and_signals_as_without_the_tie() -> None:
    text = "print(sys.argv[1:], sys.flags.isolated, re.findall('Sig(?:Ign|Blk).*', status))"
    program = f"import re, sys; status = open('/proc/self/status').read(); {text}"
    plain = [sys.executable, "-c", program, "a b", "-x"]
    alone, tied = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        for command in (plain, tied_command(plain))
    )
    assert tied == alone
    assert alone.startswith("['a b', '-x'] 0 ['SigBlk:")


@pytest.mark.parametrize(("path", "code"), [("/no/such/program", 127), ("/", 126)])
def test_program_that_cannot_run_is_named(path, code) -> None:
    ended = subprocess.run(
        tied_command([path]), capture_output=True, text=True, check=False, timeout=60
    )
    assert ended.returncode == code
    assert f"Cannot run {path}: " in ended.stderr


LAUNCHER = f"""
import subprocess, sys
sys.path[:] = {sys.path!r}
from stratagem.launch.tasks.tied_process import tied_command
# It is tied when it speaks itself.
program = "import os, time; print(os.getpid(), flush=True); time.sleep(1000)"
subprocess.Popen(tied_command([sys.executable, "-c", program])).wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_program_dies_with_its_launcher() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True
    ) as launcher:
        pid = int(launcher.stdout.readline())
        assert is_running(pid)
        launcher.kill()
    until(lambda: not is_running(pid))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_program_does_not_start_without_its_launcher(tmp_path) -> None:
    """The process that starts it is not the one that it was made for."""
    command = [sys.executable, "-I", "-S", tied_process.__file__, "1", "touch", str(tmp_path / "x")]
    ended = subprocess.run(command, check=False, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()


# Exit statuses in numbers and in words.


@pytest.mark.parametrize(
    ("returncode", "code", "text"),
    [
        (0, 0, "exit code 0"),
        (255, 255, "exit code 255"),
        # As a shell has it.
        (-9, 137, "killed by SIGKILL"),
        (-11, 139, "killed by SIGSEGV"),
        (-40, 168, "killed by signal 40"),
    ],
)
def test_end_in_numbers_and_in_words(returncode, code, text) -> None:
    assert (exit_code(returncode), describe_exit(returncode)) == (code, text)


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

"""Programs tied to the process that starts them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stratagem.launch.tasks import tied_process
from stratagem.launch.tasks.tied_process import tied_command
from tests.unit.launch.waiting import is_running, until


def test_program_runs_as_itself() -> None:
    program = "import os, sys; print(os.getpid(), sys.argv[1:], sys.flags.isolated)"
    with subprocess.Popen(
        tied_command([sys.executable, "-c", program, "a b", "-x"]),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.communicate()[0] == f"{process.pid} ['a b', '-x'] 0\n"
    assert process.returncode == 0


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which signals are ignored")
def test_program_finds_signals_as_without_the_tie() -> None:
    plain = ["grep", "-E", "Sig(Ign|Blk)", "/proc/self/status"]
    alone, tied = (
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
        for command in (plain, tied_command(plain))
    )
    assert _signals_in(tied) == _signals_in(alone)
    assert len(_signals_in(tied)) == 2


def _signals_in(status: str) -> list[int]:
    """Those up to 31: the next two are the C library's own."""
    return [int(line.split()[1], 16) & 0x7FFFFFFF for line in status.splitlines()]


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
        assert launcher.stdout is not None
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

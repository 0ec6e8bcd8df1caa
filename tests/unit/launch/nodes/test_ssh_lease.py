"""Standard input of a launcher that was started by SSH."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from stratagem.launch.nodes.ssh_launch import VARIABLE

PROGRAM = """
import os, signal, sys, time
from stratagem.launch.nodes import ssh_launch as ssh_lease
ssh_lease._LIMIT_S, ssh_lease._LEASE_MARGIN_S = map(float, sys.argv[1:])
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: print(signum, flush=True))
ssh_lease.hold_lease(0.0)
print(os.environ.get("STRATAGEM_SSH_LEASE"), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def leased(monkeypatch):
    """Starts a program that holds a lease, and reads its first line."""
    monkeypatch.setenv(VARIABLE, "1")
    started: list[subprocess.Popen[str]] = []

    def start(limit_s: float, margin_s: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(limit_s), str(margin_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"  # children do not get the variable
        return process

    yield start
    for process in started:
        process.kill()
        with process:  # closes its pipes
            pass


@pytest.mark.slow
def test_lines_are_signals_and_the_end_is_a_notice_and_then_a_kill(leased) -> None:
    process = leased(60.0, 0.2)
    process.stdin.write(f"\n{int(signal.SIGUSR1)}\n\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{int(signal.SIGUSR1)}\n"
    process.stdin.close()
    assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_silence_is_an_end(leased) -> None:
    process = leased(0.1, 0.0)
    assert process.wait(60) == -signal.SIGKILL

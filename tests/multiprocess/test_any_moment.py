"""Failures at any moment of a training: the others end within the limit and name the worker."""

from __future__ import annotations

import random
import signal
import subprocess
import time

import pytest

from tests.multiprocess.cluster import PROGRAMS, ended, started
from tests.multiprocess.namespaces import can_make_hosts, hosts

_PROGRAM = str(PROGRAMS / "running.py")
_LIMIT_S = 4
_LIMITS = {"STRATAGEM_PEER_TIMEOUT_S": str(_LIMIT_S), "STRATAGEM_STUCK_TIMEOUT_S": str(_LIMIT_S)}
# What a busy machine takes to end a process, and what JAX is given to return.
_GRACE_S = 16
# From before the first program is compiled until well after.
_LATEST_S = 10.0
_NUM_WORKERS = 3
_SIGNALS = {
    "kill": (signal.SIGKILL, "died"),
    "stop": (signal.SIGSTOP, "has not answered for"),
    "leave": (signal.SIGUSR1, "left early"),
}


def _wait_until_joined(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert "joined\n" in process.stdout  # reads so far, past what Gloo prints


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
@pytest.mark.parametrize("how", _SIGNALS)
def test_worker_is_named(how: str, number: int) -> None:
    chance = random.Random(f"{how} {number}")
    culprit, loop = chance.randrange(_NUM_WORKERS), chance.choice(["fit", "loop"])
    number_of_signal, words = _SIGNALS[how]
    with started([_PROGRAM, loop], _NUM_WORKERS, **_LIMITS) as processes:
        _wait_until_joined(processes)
        time.sleep(chance.uniform(0, _LATEST_S))
        processes[culprit].send_signal(number_of_signal)
        failed_s = time.monotonic()
        others = [ended(p) for index, p in enumerate(processes) if index != culprit]
        took_s = time.monotonic() - failed_s
    for other in others:
        assert other.code == 1, other
        message = other.errors.split("UnavailableError: ")[-1]
        assert f"worker {culprit} (127.0.0.1:" in message, other.errors
        assert words in message, other.errors
    assert took_s < _LIMIT_S + _GRACE_S


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")
@pytest.mark.parametrize("number", range(20))
def test_worker_whose_link_is_down_is_named(number: int) -> None:
    """And so is process 0 by the worker that hears nobody any more; process 0 names any other."""
    chance = random.Random(f"link {number}")
    culprit, loop = chance.randrange(_NUM_WORKERS), chance.choice(["fit", "loop"])
    with (
        hosts(_NUM_WORKERS) as three,
        started([_PROGRAM, loop], _NUM_WORKERS, three, **_LIMITS) as processes,
    ):
        _wait_until_joined(processes)
        time.sleep(chance.uniform(0, _LATEST_S))
        subprocess.run([*three[culprit][0], "ip", "link", "set", "eth0", "down"], check=True)
        failed_s = time.monotonic()
        every = [ended(process) for process in processes]
        took_s = time.monotonic() - failed_s
    for index, one in enumerate(every):
        named = {culprit} if index != culprit else {0} if culprit else {1, 2}
        assert one.code == 1, one
        message = one.errors.split("UnavailableError: ")[-1]
        assert any(
            f"worker {other} (10.77.0.{other + 1}:2222) has not answered for" in message
            for other in named
        ), one
    assert took_s < _LIMIT_S + _GRACE_S

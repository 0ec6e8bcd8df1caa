"""Processes forked from a server that has imported their modules."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.prefork import fork_server
from stratagem.launch.prefork.fork_server import ForkedProcess, ForkServer
from tests.unit.launch.prefork import served_objects
from tests.unit.launch.remote.living import descendants, wait_for_end
from tests.unit.launch.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

_VARIABLES = {**os.environ, "SERVED_OBJECTS": "yes"}
_ROOT = Path(__file__).parents[4]
_SERVE = pickle.dumps((served_objects.serve, ()))


@pytest.fixture
def server() -> Iterator[ForkServer]:
    server = ForkServer(["numpy", "colorsys"], _VARIABLES)
    yield server
    server.close()
    assert server.is_over


def _state(process: ForkedProcess) -> dict[str, Any]:
    return json.loads(process.address)


def test_process_has_what_was_loaded_and_another_follows_one_that_was_killed(server) -> None:
    first = server.fork("object", _SERVE)
    state = _state(first)
    assert state["modules"] == ["colorsys", "numpy"]
    assert state["variable"] == "yes"
    assert first.pid in descendants(os.getpid())
    first.kill()
    assert first.wait() == -signal.SIGKILL
    assert first.wait() == -signal.SIGKILL
    second = server.fork("object", _SERVE)
    assert second.pid != first.pid
    assert _state(second)["parent"] == state["parent"]
    assert _state(second)["numbers"] != state["numbers"]
    first.kill()  # is no more
    second.kill()
    assert second.wait() == -signal.SIGKILL


def test_closing_closes_the_object_and_ends_the_process(server, tmp_path) -> None:
    process = server.fork("object", pickle.dumps((served_objects.serve, (str(tmp_path),))))
    process.close()
    assert tmp_path.joinpath("closed").read_text() == str(process.pid)
    assert not wait_for_end([process.pid])


def test_object_that_cannot_be_closed_is_reported(capfd) -> None:
    server = ForkServer(["numpy"], _VARIABLES)
    server.fork("object", _SERVE).close()
    server.close()
    assert "nowhere to leave a file" in capfd.readouterr().err


def test_error_of_the_function_is_raised_with_its_traceback(server) -> None:
    with pytest.raises(RuntimeError, match="A forked process cannot start: ") as raised:
        server.fork("object", pickle.dumps((served_objects.serve_nothing, ())))
    assert "nothing to serve" in str(raised.value)
    assert "in serve_nothing" in str(raised.value)
    process = server.fork("object", _SERVE)  # the next one starts
    process.kill()
    process.wait()


def test_process_that_dies_while_it_starts_is_reported(server) -> None:
    with pytest.raises(UnavailableError, match="A forked process died before it replied"):
        server.fork("object", pickle.dumps((served_objects.end, (3,))))


def test_process_that_does_not_reply_in_time_is_reported(server) -> None:
    server.wait_until_loaded()
    # On a busy machine even the fork itself is late.
    expected = "A forked process died before it replied|has not forked a process within 0.1 s"
    with pytest.raises(UnavailableError, match=expected):
        server.fork("object", pickle.dumps((time.sleep, (1000,))), timeout_s=0.1)
    process = server.fork("object", _SERVE)
    assert process.poll() is None
    process.kill()
    assert process.wait() == process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("waits", [False, True])
def test_end_is_noticed_while_the_server_is_stopped(server, monkeypatch, waits) -> None:
    monkeypatch.setattr(fork_server, "_UNREPORTED_S", 0.1)
    process = server.fork("object", _SERVE)
    parent = _state(process)["parent"]
    os.kill(parent, signal.SIGSTOP)
    try:
        assert process.poll() is None
        process.kill()
        if not waits:
            until(lambda: process.poll() is not None)
            assert process.poll() == -signal.SIGKILL
        assert process.wait() == -signal.SIGKILL
    finally:
        os.kill(parent, signal.SIGCONT)


def test_stopped_server_is_reported(server, monkeypatch) -> None:
    first = server.fork("object", _SERVE)
    parent = _state(first)["parent"]
    os.kill(parent, signal.SIGSTOP)
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.3")
    words = r"has not forked a process within 0\.3 s: it was stopped(.|\n)*STRATAGEM_PEER_TIMEOUT_S"
    with pytest.raises(UnavailableError, match=words):
        server.fork("object", _SERVE)
    assert first.poll() is None
    os.kill(parent, signal.SIGCONT)
    first.close()


def test_server_that_is_stopped_while_it_loads_is_reported(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.2")
    server = ForkServer(["keras"], _VARIABLES)
    with (
        contextlib.closing(server),
        pytest.raises(UnavailableError, match=r"has not loaded its modules within 0\.2 s"),
    ):
        server.fork("object", _SERVE)


def test_what_cannot_be_loaded_is_reported() -> None:
    server = ForkServer(["no_such_module"], _VARIABLES)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="No module named 'no_such_module'"):
            server.fork("object", _SERVE)
    server.close()
    assert server.is_over


def test_processes_die_with_what_they_were_forked_from(server) -> None:
    process = server.fork("object", _SERVE)
    os.kill(_state(process)["parent"], signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not wait_for_end([process.pid])
    assert server.is_over
    with pytest.raises(UnavailableError, match="A forked process died before it replied"):
        server.fork("object", _SERVE)


def test_nothing_is_left_when_who_started_it_is_killed() -> None:
    program = (
        "import os, pickle, sys\n"
        "from stratagem.launch.prefork.fork_server import ForkServer\n"
        "from tests.unit.launch.prefork import served_objects\n"
        "server = ForkServer([], dict(os.environ))\n"
        "process = server.fork('object', pickle.dumps((served_objects.serve, ())))\n"
        "print('pid', process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
    ) as starter:
        assert starter.stdout.readline() == "made\n"
        pid = int(starter.stdout.readline().removeprefix("pid "))
        started = descendants(starter.pid)
        assert pid in started
        starter.kill()
        assert not wait_for_end(started)


@pytest.mark.slow
def test_backend_that_has_started_is_refused() -> None:
    server = ForkServer(["jax", "tests.unit.launch.prefork.starts_backend"], _VARIABLES)
    with pytest.raises(RuntimeError, match="A JAX backend has started"):
        server.fork("object", _SERVE)
    server.close()


def test_fork_that_the_system_refuses_ends_no_other_process() -> None:
    modules = ["numpy", "colorsys", "tests.unit.launch.prefork.forks_twice"]
    path = os.pathsep.join(sys.path)
    server = ForkServer(modules, {**_VARIABLES, "PYTHONPATH": path})
    first = server.fork("object", _SERVE)
    with pytest.raises(UnavailableError, match="A forked process died before it replied"):
        server.fork("object", _SERVE)
    assert first.poll() is None
    second = server.fork("object", _SERVE)
    for process in (first, second):
        process.kill()
        assert process.wait() == -signal.SIGKILL
    server.close()

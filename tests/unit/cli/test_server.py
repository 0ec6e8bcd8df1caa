"""`stratagem server` and `stratagem input-service`: what they start, and their exit."""

from __future__ import annotations

import json
import signal
import socket
import threading
from typing import Any

import pytest
from click.testing import Result

from stratagem.cli import main
from stratagem.errors import UnavailableError
from stratagem.launch import remote
from stratagem.launch.remote.server import Server
from tests.command_runner import CliRunner
from tests.unit.input.service.servers import input_servers
from tests.unit.launch.waiting import until

CLUSTER = {"chief": ["127.0.0.1:2222"], "worker": ["b:1"]}


@pytest.fixture(autouse=True)
def same_signals() -> Any:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def served(monkeypatch) -> list[tuple[str, int, int | None]]:
    """Servers that are started, none of them for real."""
    started: list[tuple[str, int, int | None]] = []

    def start(self: Server) -> None:
        definition = self.server_def
        started.append((definition.job_name, definition.task_index, self._jobs_port))

    monkeypatch.setattr(remote.Server, "start", start)
    return started


def _call(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["server", *arguments])


def test_task_of_the_environment_is_served(served, monkeypatch) -> None:
    config = {"cluster": CLUSTER, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    result = _call("--jobs-port", "9000")
    assert (result.exit_code, result.stdout) == (0, "worker 0 is ready.\n")
    assert served == [("worker", 0, 9000)]


def test_options_name_the_task(served, monkeypatch) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": CLUSTER}))
    assert _call("--job-name", "chief").exit_code == 0
    only = json.dumps({"ps": ["a:1"]})
    assert _call("--cluster", only).exit_code == 0
    assert served == [("chief", 0, None), ("ps", 0, None)]


def test_what_is_wrong_is_a_message(served, monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    for arguments, code, words in (
        ([], 1, "Error: TF_CONFIG has the cluster"),
        (["--cluster", "{"], 2, "--cluster is not JSON"),
    ):
        result = _call(*arguments)
        assert result.exit_code == code
        assert words in result.stderr


def test_end_by_a_signal_is_in_order(served, monkeypatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(remote.Server, "join", lambda self: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(remote.Server, "close", lambda self: closed.append(True))
    result = _call("--cluster", json.dumps({"ps": ["a:1"]}))
    assert (result.exit_code, closed) == (143, [True])


def test_failure_is_a_message(served, monkeypatch) -> None:
    def fail(self: Server) -> None:
        raise UnavailableError("Ray has ended on this machine")

    monkeypatch.setattr(remote.Server, "join", fail)
    result = _call("--cluster", json.dumps({"ps": ["a:1"]}))
    assert (result.exit_code, result.stderr) == (1, "Error: Ray has ended on this machine\n")


# `stratagem input-service`: a dispatcher and workers until SIGTERM.


def _input_service(*arguments: str, ends: bool = True) -> Result:
    before = signal.getsignal(signal.SIGTERM)

    def end() -> None:  # once the command handles the signal, which would end this process
        until(lambda: signal.getsignal(signal.SIGTERM) is not before)
        signal.raise_signal(signal.SIGTERM)

    thread = threading.Thread(target=end)
    if ends:
        thread.start()
    try:
        return CliRunner().invoke(main, ["input-service", *arguments])
    finally:
        if ends:
            thread.join()


def test_service_runs_until_sigterm() -> None:
    result = _input_service("--workers", "0")
    assert result.exit_code == 0
    assert result.stdout.startswith("Input service at tcp://127.0.0.1:")
    assert result.stdout.endswith("has 0 workers.\n")


def test_workers_join_another_dispatcher() -> None:
    with input_servers(0) as servers:
        result = _input_service("--workers", "0", "--dispatcher", servers.target)
    assert (result.exit_code, result.stdout) == (0, f"0 input workers joined {servers.target}.\n")


def test_failure_of_the_input_service_is_a_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = _input_service("--port", port, ends=False)
    assert result.exit_code == 1
    assert "Error:" in result.stderr
    result = _input_service("--host", "10.0.0.1", ends=False)
    assert result.exit_code == 1
    assert "The input service has no secret" in result.stderr

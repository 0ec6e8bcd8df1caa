"""`stratagem input-service`: a dispatcher and workers until SIGTERM."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import Result

from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.unit.input.service.servers import input_servers
from tests.unit.launch.waiting import until


@pytest.fixture(autouse=True)
def same_signals() -> Iterator[Any]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def _call(*arguments: str, ends: bool = True) -> Result:
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
    result = _call("--workers", "0")
    assert result.exit_code == 0
    assert result.stdout.startswith("Input service at tcp://127.0.0.1:")
    assert result.stdout.endswith("has 0 workers.\n")


def test_workers_join_another_dispatcher() -> None:
    with input_servers(0) as servers:
        result = _call("--workers", "0", "--dispatcher", servers.target)
    assert (result.exit_code, result.stdout) == (
        0,
        f"0 input workers joined {servers.target}.\n",
    )


def test_failure_is_a_message() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = _call("--port", port, ends=False)
    assert result.exit_code == 1
    assert "Error:" in result.stderr
    result = _call("--host", "10.0.0.1", ends=False)
    assert result.exit_code == 1
    assert "The input service has no secret" in result.stderr

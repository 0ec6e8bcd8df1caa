"""`stratagem doctor --cluster`: several machines, as network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stratagem.cli import main
from tests.command_runner import CliRunner
from tests.multiprocess.namespaces import can_make_hosts, hosts, knowing
from tests.unit.cli.doctor.environments import cluster

pytestmark = pytest.mark.slow

_SOURCE = str(Path(__file__).parents[3] / "src")
_LIMIT_S = 120
_COMMAND = [sys.executable, "-m", "stratagem", "doctor"]
_NAMESPACES = pytest.mark.skipif(not can_make_hosts(), reason="needs root and iproute2")


def _variables(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": _SOURCE, "JAX_PLATFORMS": "cpu", **more}


def _on_each(
    machines: Sequence[tuple[list[str], str]], *arguments: str, addresses: Sequence[str]
) -> list[tuple[int, dict[str, Any]]]:
    """Runs the command on the machines; returns exit codes and what was printed as JSON."""
    processes = [
        subprocess.Popen(
            [*command, *_COMMAND, "--cluster", "--json", *arguments],
            env=_variables(TF_CONFIG=cluster(addresses, index), STRATAGEM_SECRET="s" * 32),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, (command, _) in enumerate(machines)
    ]
    try:
        printed = [process.communicate(timeout=_LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        (process.returncode, json.loads(text))
        for process, text in zip(processes, printed, strict=True)
    ]


def _errors(printed: dict[str, Any]) -> list[str]:
    return [one["text"] for one in printed["findings"] if one["level"] == "error"]


@_NAMESPACES
def test_lost_connection_is_named_with_its_hosts_on_all() -> None:
    """Host 2 is behind a lost neighbor entry of host 1, which has its own name on loopback."""
    with hosts(3, "10.87.0") as machines, contextlib.ExitStack() as stack:
        for index, (command, _) in enumerate(machines):
            own = "127.0.1.1" if index == 1 else "10.87.0.2"
            stack.enter_context(knowing(command, "second", own))
        # Packets from the second to the third host go to a network card that does not exist.
        lost = ["neigh", "replace", "10.87.0.3", "lladdr", "02:00:00:00:00:99", "dev", "eth0"]
        subprocess.run([*machines[1][0], "ip", *lost], check=True)
        addresses = ["10.87.0.1:2222", "second:2222", "10.87.0.3:2222"]
        results = _on_each(machines, "--limit", "1", addresses=addresses)
    first, second, third = (printed for _, printed in results)
    assert [code for code, _ in results] == [1, 1, 1]
    assert first == second == third
    of_task, free = (text for text in _errors(first) if "cannot reach worker 2" in text)
    assert of_task == "worker 1 cannot reach worker 2 at 10.87.0.3:2222: no answer in time."
    assert free.startswith("worker 1 cannot reach worker 2 at 10.87.0.3 on free ports")
    # Answers to the third host are lost, too.
    failed = {(one["source"], one["to"]) for one in first["survey"]["failures"]}
    assert failed == {(1, 2), (2, 1)}


@_NAMESPACES
def test_host_that_is_out_of_reach_is_named_on_the_others() -> None:
    with hosts(2, "10.88.0") as machines:
        addresses = [*(address for _, address in machines), "10.88.0.9:2222"]
        results = _on_each(machines, "--wait", "20", addresses=addresses)
    for code, printed in results:
        assert code == 1
        assert printed["survey"] is None
        missing, away = _errors(printed)[:2]
        assert missing.startswith("2 of 3 joined within 20 s; worker 2 (10.88.0.9:2222) did not.")
        assert away.startswith("worker 2 at 10.88.0.9:2222 cannot be reached")


def test_mistake_of_the_command_line_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["doctor", "--cluster", "--wait", "0"])
    assert result.exit_code == 2
    assert "0.0" in result.stderr

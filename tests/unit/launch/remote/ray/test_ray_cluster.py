"""Connection to Ray: started here or found, and closed completely."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ray

from stratagem.errors import DeadlineExceededError
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.remote.ray import ray_cluster
from stratagem.launch.remote.ray.ray_cluster import RayCluster, has_token, start_local_ray
from tests.unit.launch.remote.living import name_of, wait_for_end

PROGRAM = """
import json, os, signal, sys
from stratagem.cluster.preemption.signals import has_foreign_handler
from stratagem.launch.remote.ray.ray_cluster import start_local_ray
before = signal.getsignal(signal.SIGTERM)
cluster = start_local_ray()
cluster.wait()
from stratagem.launch.processes.ray_processes import RayProcesses
from stratagem.group.transport.keys import ClusterKeys
from tests.unit.parameter_server import forked_objects as served
from tests.unit.launch.remote.living import descendants
processes = RayProcesses("worker", served.serve_told, [(ClusterKeys.make(), sys.argv[1])])
processes.addresses
processes.watch(print, print, print)
facts = {
    "started": sorted(descendants(os.getpid())),
    "pids": processes.pids,
    "is_handler_kept": signal.getsignal(signal.SIGTERM) is before,
    "has_foreign_handler": has_foreign_handler(signal.SIGTERM),
    "mode": os.environ.get("RAY_AUTH_MODE"),
}
print("TOLD " + json.dumps(facts), flush=True)
if sys.stdin.read() == "fail":
    raise SystemExit("failed on purpose")
"""


class Program:
    """A program of its own, with a home of its own, that has started Ray."""

    def __init__(self, folder: Path) -> None:
        left_out = ("RAY_", "STRATAGEM_TEST")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            env={**variables, "HOME": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        self.facts: dict[str, Any] = {}
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("TOLD "):
                self.facts = json.loads(line[5:])
                break

    def end(self, said: str | None) -> None:
        """Ends it: by what it reads, or by SIGKILL."""
        if said is None:
            self.process.kill()
        out, err = self.process.communicate(said, timeout=60)
        self.lines += [*out.splitlines(), *err.splitlines()]


@pytest.mark.slow
def test_program_that_fails_leaves_nothing(tmp_path) -> None:
    program = Program(tmp_path)
    assert len(program.facts["started"]) > 4
    program.end("fail")
    assert program.process.returncode == 1
    assert "failed on purpose" in program.lines
    assert wait_for_end(program.facts["started"]) == set()
    # In good order: what it served was closed.
    (pid,) = program.facts["pids"]
    assert tmp_path.joinpath("closed-0").read_text() == str(pid)
    # What a process prints comes with its name, and the id of the one that keeps it.
    line = re.compile(rf"\(worker:0 pid=\d+\) process 0 serves {re.escape(str(tmp_path))}")
    assert any(map(line.fullmatch, program.lines))
    # Ray takes SIGTERM from programs that connect in their main thread.
    assert program.facts["is_handler_kept"]
    # A notice of preemption can then be received, and the handler be restored.
    assert not program.facts["has_foreign_handler"]
    assert program.facts["mode"] == "token"
    token = tmp_path / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.slow
def test_program_that_is_killed_leaves_nothing_that_works(tmp_path) -> None:
    program = Program(tmp_path)
    started = set(program.facts["started"])
    assert program.facts["pids"][0] in started
    # Ray's agents hold nothing, but look for its head a minute or two before they end.
    agents = {pid for pid in started if name_of(pid).endswith("Agent")}
    program.end(None)
    try:
        assert wait_for_end(started - agents) == set()
        assert len(agents) == 2
    finally:
        for pid in wait_for_end(agents, timeout_s=0.1):
            os.kill(pid, signal.SIGKILL)


def test_token_is_made_once(tmp_path, monkeypatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_token()
    ray_cluster.make_token()
    token = tmp_path.joinpath(".ray", "auth_token").read_text()
    assert has_token()
    ray_cluster.make_token()
    assert tmp_path.joinpath(".ray", "auth_token").read_text() == token


def test_token_of_a_home_that_cannot_be_written_is_in_the_environment(monkeypatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")  # which is none, and set again at the end
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", "/proc/no-such-folder")
    ray_cluster.make_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_no_token_is_made_for_who_wants_none(tmp_path, monkeypatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("HOME", str(tmp_path))
    ray_cluster.make_token()
    assert not has_token()


def test_client_of_ray_is_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="is an address of Ray Client"):
        RayCluster("ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ValueError, match="Ray address 'ray://head:10001'"):
        start_local_ray()


@pytest.fixture
def own_settings(monkeypatch) -> None:
    """What connecting sets is gone afterwards."""
    for name in (*ray_cluster.quiet_settings(), "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("own_settings")
def test_address_where_no_ray_is_is_reported(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.3")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with start_local_ray(address) as cluster:
        assert not cluster.started_here
        with pytest.raises(DeadlineExceededError, match=f"head of the Ray cluster at {address}"):
            cluster.wait()
    assert not ray.is_initialized()


@pytest.mark.usefixtures("own_settings")
def test_ray_that_is_not_installed_is_reported(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        start_local_ray() as cluster,
        pytest.raises(ImportError, match="a cluster of parameter servers needs ray"),
    ):
        cluster.wait()

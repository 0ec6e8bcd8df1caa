"""Ray's node of this machine: its end is noticed, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.remote.ray import node_process
from stratagem.launch.remote.ray.node_process import RayNode
from stratagem.launch.remote.ray.ray_nodes import start_head
from tests.unit.launch.remote.living import descendants, name_of, wait_for_end
from tests.unit.launch.remote.ray.answering import answering

pytestmark = pytest.mark.usefixtures("ray_settings")


@pytest.mark.slow
def test_node_that_fails_while_the_head_goes_on_says_why() -> None:
    with (
        answering() as head,
        RayNode(["--no-such-option"], head) as node,
        pytest.raises(UnavailableError, match="Ray ended on this machine") as raised,
    ):
        node.wait()
    assert "--no-such-option" in str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "signum", "error"),
    [
        ("/raylet/raylet", signal.SIGTERM, "its raylet has ended"),
        ("/raylet/raylet", signal.SIGSTOP, "its raylet does not answer"),
        ("/dashboard/dashboard.py", signal.SIGTERM, "its dashboard has ended"),
    ],
)
def test_service_that_ends_in_order_or_was_stopped_ends_the_node(
    part: str, signum: signal.Signals, error: str, monkeypatch
) -> None:
    """`ray start --block` continues then, as after a raylet that lost its agent."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "6")
    before = descendants(os.getpid())
    errors: list[str] = []

    def wait() -> None:
        try:
            node.wait()
        except UnavailableError as raised:
            errors.append(str(raised))

    port, jobs_port = free_ports(2)
    with start_head(f"127.0.0.1:{port}", jobs_port=jobs_port) as node:
        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        (process,) = [
            pid
            for pid in descendants(os.getpid()) - before
            if any(part in word for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))
        ]
        time.sleep(3.0)  # the node has seen them answer
        os.kill(process, signum)
        waiting.join(60.0)
        assert not waiting.is_alive()
    assert [error in one for one in errors] == [True]
    assert wait_for_end(descendants(os.getpid()) - before) == set()


_STARTS_A_HEAD = """
import sys, time
from stratagem.launch.remote.ray.ray_nodes import start_head

with start_head(sys.argv[1], jobs_port=int(sys.argv[2])) as node:
    time.sleep(600)
"""


@pytest.mark.slow
def test_agent_that_was_stopped_ends_with_a_killed_node(monkeypatch) -> None:
    """A dashboard agent also outlives a killed node after a jump of the clock."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    port, jobs_port = free_ports(2)
    program = subprocess.Popen(
        [sys.executable, "-c", _STARTS_A_HEAD, f"127.0.0.1:{port}", str(jobs_port)]
    )
    try:
        agent, deadline_s = 0, time.monotonic() + 60.0
        while not agent and time.monotonic() < deadline_s:
            time.sleep(0.1)
            agent = next(
                (one for one in descendants(program.pid) if "DashboardAgent" in name_of(one)), 0
            )
        assert agent
        os.kill(agent, signal.SIGSTOP)
        started = descendants(program.pid)
    finally:
        program.kill()
        program.wait()
    assert wait_for_end(started) == set()


def test_workers_that_do_not_end_with_their_raylet_or_node_are_killed(monkeypatch) -> None:
    monkeypatch.setattr(node_process, "_WORKERS_END_S", 0.3)
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine, orphaned = f"{os.getpid()}-1", f"{ended.pid}-1"
    variables = {**os.environ, node_process._NODE_VARIABLE: mine}

    def start(name: str, **others: str) -> subprocess.Popen[bytes]:
        command = ["bash", "-c", f"exec -a {name} sleep 60"]
        return subprocess.Popen(command, env={**variables, **others})

    worker = start("ray::IDLE")
    another = {node_process._NODE_VARIABLE: f"{os.getpid()}-2"}
    others = [start("program"), start("ray::IDLE", **another)]
    orphan = start("ray::DashboardAgent", **{node_process._NODE_VARIABLE: orphaned})
    try:
        deadline_s = time.monotonic() + 120
        while len(node_process._marked_workers()) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert node_process._workers(mine) == [worker.pid]
        node_process._end_orphans()
        assert orphan.wait(timeout=120) == -signal.SIGKILL
        assert worker.poll() is None
        node_process._end_workers(mine)
        assert worker.wait(timeout=120) == -signal.SIGKILL
        assert [one.poll() for one in others] == [None, None]
    finally:
        for one in (worker, orphan, *others):
            one.kill()
            one.wait()

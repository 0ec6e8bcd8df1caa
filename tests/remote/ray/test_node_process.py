"""Ray's node of this machine: its end is noticed, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.plan.ports import free_ports
from stratagem.remote.ray import node_process
from stratagem.remote.ray.node_process import RayNode
from stratagem.remote.ray.ray_nodes import start_head
from tests.remote.living import descendants, wait_for_end

pytestmark = pytest.mark.usefixtures("ray_settings")


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_node_that_fails_while_the_head_goes_on_says_why(listening) -> None:
    with (
        RayNode(["--no-such-option"], listening) as node,
        pytest.raises(UnavailableError, match="Ray ended on this machine") as raised,
    ):
        node.wait()
    assert "--no-such-option" in str(raised.value)


def test_raylet_that_ends_in_order_ends_the_node(monkeypatch) -> None:
    """`ray start --block` goes on after a raylet that received SIGTERM, or lost its agent."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    before = descendants(os.getpid())
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with start_head(address) as node:
        (raylet,) = [
            pid
            for pid in descendants(os.getpid()) - before
            if "/raylet/raylet" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
        ]
        os.kill(raylet, signal.SIGTERM)
        waiting = threading.Thread(target=node.wait, daemon=True)
        waiting.start()
        waiting.join(60.0)
        assert not waiting.is_alive()
    assert wait_for_end(descendants(os.getpid()) - before) == set()


def test_workers_that_do_not_end_with_their_raylet_are_killed(monkeypatch) -> None:
    monkeypatch.setattr(node_process, "_WORKERS_END_S", 0.3)
    variables = {**os.environ, node_process._NODE_VARIABLE: "mine"}

    def start(name: str, **others: str) -> subprocess.Popen[bytes]:
        command = ["bash", "-c", f"exec -a {name} sleep 60"]
        return subprocess.Popen(command, env={**variables, **others})

    worker = start("ray::IDLE")
    others = [start("program"), start("ray::IDLE", **{node_process._NODE_VARIABLE: "another"})]
    try:
        deadline_s = time.monotonic() + 30.0
        while not node_process._workers("mine") and time.monotonic() < deadline_s:
            time.sleep(0.05)
        assert node_process._workers("mine") == [worker.pid]
        node_process._end_workers("mine")
        assert worker.wait(timeout=10) == -signal.SIGKILL
        assert [one.poll() for one in others] == [None, None]
    finally:
        for one in (worker, *others):
            one.kill()
            one.wait()

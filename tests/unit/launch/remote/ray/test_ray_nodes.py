"""Ray clusters formed by tasks: a leader and nodes that join it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.remote.ray.ray_nodes import join_as_node, start_head
from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.unit.launch.remote.living import descendants, wait_for_end

pytestmark = pytest.mark.usefixtures("ray_settings")


def test_cluster_without_a_token_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for start in (
        lambda: start_head("127.0.0.1:2222"),
        lambda: join_as_node("127.0.0.1:2222", "ps", 0),
    ):
        with pytest.raises(RuntimeError, match="has no token for the Ray cluster"):
            start()


def test_leader_that_loaded_ray_too_early_is_reported(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", object())
    with pytest.raises(RuntimeError, match="Ray was imported before RAY_AUTH_MODE was set"):
        start_head("127.0.0.1:2222")


def test_addresses_are_checked() -> None:
    with pytest.raises(ValueError, match="not of the form host:port"):
        start_head("127.0.0.1")
    with pytest.raises(ValueError, match="not of the form host:port"):
        join_as_node("127.0.0.1", "ps", 0)


def test_leader_that_is_not_there_is_reported() -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(DeadlineExceededError, match=r"waited 0\.2 s for the head") as raised:
        join_as_node(address, "worker", 1, timeout_s=0.2)
    assert f"worker 1 waited 0.2 s for the head of the Ray cluster at {address}" in str(
        raised.value
    )


def test_start_that_takes_too_long_is_reported_and_leaves_nothing(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    before = descendants(os.getpid())
    with pytest.raises(DeadlineExceededError, match="did not start on this machine in time"):
        start_head(f"127.0.0.1:{free_ports(1)[0]}", timeout_s=0.01)
    assert wait_for_end(descendants(os.getpid()) - before) == set()


@pytest.mark.slow
def test_head_that_cannot_start_says_why(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/such/file")  # which Ray takes for fatal
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(UnavailableError, match="head of the Ray cluster cannot start at"):
        start_head(address)


LEADER = """
import json, sys
from stratagem.launch.remote.ray.ray_cluster import start_local_ray
from stratagem.launch.remote.ray.ray_nodes import start_head
from stratagem.launch.processes.ray_processes import RayProcesses
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.wire import Message
from tests.unit.parameter_server import forked_objects as served

address, hosts = sys.argv[1], json.loads(sys.argv[2])
keys = ClusterKeys.make()
with start_head(address), start_local_ray(address) as cluster:
    cluster.wait()
    tasks = sorted(hosts)
    with RayProcesses(
        "task", served.serve_at, [(keys, hosts[task]) for task in tasks],
        resources=[{task: 1} for task in tasks],
    ) as processes:
        with Connections(keys, processes.addresses) as connections:
            asked = {index: Message("describe") for index in range(len(tasks))}
            assert len(connections.ask_all(asked, timeout_s=120.0)) == len(tasks)
        processes.watch(
            lambda index, why: print(f"lost {tasks[index]}", flush=True),
            lambda index, where: print(f"returned {tasks[index]} {where}", flush=True),
            lambda index, error: print(f"given up {tasks[index]} {error}", flush=True),
        )
        print("placed", json.dumps(dict(zip(tasks, processes.addresses))), flush=True)
        sys.stdin.read()
"""

JOINER = """
import sys
from stratagem.launch.remote.ray.ray_nodes import join_as_node
from stratagem.errors import UnavailableError
try:
    node = join_as_node(sys.argv[1], sys.argv[2], int(sys.argv[3]), host=sys.argv[4])
except UnavailableError as error:
    raise SystemExit(f"refused {error}")
print("joined", flush=True)
node.wait()
print("over", flush=True)
"""


def _run(host: list[str], program: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*host, sys.executable, "-c", program, *arguments],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


class Lines:
    """What a program prints, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.read: list[str] = []
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.read.append(line.rstrip())

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()  # of a test that failed; what it has started ends with it
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            self._thread.join(120)
            pipe.close()

    def wait_for(self, start: str, timeout_s: float = 120.0) -> str:
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            for line in self.read:
                if line.startswith(start):
                    return line
            threading.Event().wait(0.05)
        raise AssertionError(f"{start!r} is not among {self.read}")


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces can be made here")
def test_machines_join_leave_and_return() -> None:
    """Each process is on the machine of its task; one whose machine has gone returns with it."""
    with contextlib.ExitStack() as stack:
        machines = stack.enter_context(hosts(3, "10.78.0"))
        before = descendants(os.getpid())
        addresses = [address.partition(":")[0] for _, address in machines]
        head = machines[0][1]
        places = dict(zip(["ps:0", "worker:0"], addresses[1:], strict=True))

        def join(place: int, task: str, **variables: str) -> Lines:
            kind, _, index = task.partition(":")
            lines = Lines(
                _run(machines[place][0], JOINER, head, kind, index, addresses[place], **variables)
            )
            stack.callback(lines.close)
            return lines

        stranger = join(1, "ps:0", RAY_AUTH_TOKEN="f" * 64)
        server, worker = join(1, "ps:0"), join(2, "worker:0")  # which wait for the leader
        leader = Lines(_run(machines[0][0], LEADER, head, json.dumps(places)))
        stack.callback(leader.close)
        placed = json.loads(leader.wait_for("placed")[len("placed ") :])
        assert {task: one.split("/")[2].partition(":")[0] for task, one in placed.items()} == places
        assert "cannot join the Ray cluster" in stranger.wait_for("refused")

        worker.process.kill()
        leader.wait_for("lost worker:0")
        back = join(2, "worker:0")
        returned = leader.wait_for("returned worker:0")
        assert f"tcp://{addresses[2]}:" in returned

        assert leader.process.stdin is not None
        leader.process.stdin.close()
        assert leader.process.wait(timeout=60) == 0, leader.read
        for one in (server, back):
            one.wait_for("over")
            assert one.process.wait(timeout=60) == 0
        for one in (stranger, worker):
            one.process.wait(timeout=60)
        assert wait_for_end(descendants(os.getpid()) - before) == set()


def test_own_host_that_is_unknown_is_named_with_its_task_and_setting(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UnavailableError, match=r"correct the address of chief 0 in TF_CONFIG") as e:
        start_head("no-such-host.invalid:2222")
    assert "The host 'no-such-host.invalid' of chief 0 is unknown on this machine" in str(e.value)

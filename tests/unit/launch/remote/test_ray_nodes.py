"""Ray clusters formed by tasks: a leader and nodes that join it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stratagem.cluster.addresses import free_ports
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.remote import ray_nodes
from stratagem.launch.remote.ray_nodes import RayNode, join_as_node, leader_of, start_head, tasks_of
from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.unit.launch.remote.answering import answering
from tests.unit.launch.remote.living import PrintedLines, descendants, name_of, wait_for_end
from tests.unit.launch.waiting import until

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


def test_leader_that_is_not_there_is_reported(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.2")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with pytest.raises(DeadlineExceededError, match=r"waited 0\.2 s for the head") as raised:
        join_as_node(address, "worker", 1)
    assert f"worker 1 waited 0.2 s for the head of the Ray cluster at {address}" in str(
        raised.value
    )


def test_start_that_takes_too_long_is_reported_and_leaves_nothing(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.01")
    before = descendants(os.getpid())
    with pytest.raises(DeadlineExceededError, match="did not start on this machine in time"):
        start_head(f"127.0.0.1:{free_ports(1)[0]}")
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
from stratagem.launch.remote.ray_cluster import RayCluster
from stratagem.launch.remote.ray_nodes import start_head
from stratagem.launch.processes import RayProcesses
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.wire import Message
from tests.unit.parameter_server import forked_objects as served

address, hosts = sys.argv[1], json.loads(sys.argv[2])
keys = ClusterKeys.make()
with start_head(address), RayCluster(address) as cluster:
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
from stratagem.launch.remote.ray_nodes import join_as_node
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

        def join(place: int, task: str, **variables: str) -> PrintedLines:
            kind, _, index = task.partition(":")
            lines = PrintedLines(
                _run(machines[place][0], JOINER, head, kind, index, addresses[place], **variables)
            )
            stack.callback(lines.close)
            return lines

        stranger = join(1, "ps:0", RAY_AUTH_TOKEN="f" * 64)
        server, worker = join(1, "ps:0"), join(2, "worker:0")  # which wait for the leader
        leader = PrintedLines(_run(machines[0][0], LEADER, head, json.dumps(places)))
        stack.callback(leader.close)
        placed = json.loads(leader.wait_for("placed")[len("placed ") :])
        assert {task: one.split("/")[2].partition(":")[0] for task, one in placed.items()} == places
        assert "cannot join the Ray cluster" in stranger.wait_for("refused")

        worker.process.kill()
        leader.wait_for("lost worker:0")
        back = join(2, "worker:0")
        returned = leader.wait_for("returned worker:0")
        assert f"tcp://{addresses[2]}:" in returned

        leader.process.stdin.close()
        assert leader.process.wait(timeout=60) == 0, leader.lines
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


# Ray's node of this machine: its end is noticed, and nothing of it is left.


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
def test_service_that_ends_or_was_stopped_ends_the_node(part, signum, error, monkeypatch) -> None:
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
from stratagem.launch.remote.ray_nodes import start_head

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
        agents: list[int] = []
        until(
            lambda: (
                agents.extend(
                    one for one in descendants(program.pid) if "DashboardAgent" in name_of(one)
                )
                or agents
            )
        )
        os.kill(agents[0], signal.SIGSTOP)
        started = descendants(program.pid)
    finally:
        program.kill()
        program.wait()
    assert wait_for_end(started) == set()


def test_workers_that_do_not_end_with_their_raylet_or_node_are_killed(monkeypatch) -> None:
    monkeypatch.setattr(ray_nodes, "_WORKERS_END_S", 0.3)
    ended = subprocess.Popen(["true"])
    ended.wait()
    mine, orphaned = f"{os.getpid()}-1", f"{ended.pid}-1"
    variables = {**os.environ, ray_nodes._NODE_VARIABLE: mine}

    def start(name: str, **others: str) -> subprocess.Popen[bytes]:
        command = ["bash", "-c", f"exec -a {name} sleep 60"]
        return subprocess.Popen(command, env={**variables, **others})

    worker = start("ray::IDLE")
    another = {ray_nodes._NODE_VARIABLE: f"{os.getpid()}-2"}
    others = [start("program"), start("ray::IDLE", **another)]
    orphan = start("ray::DashboardAgent", **{ray_nodes._NODE_VARIABLE: orphaned})
    try:
        until(lambda: len(ray_nodes._marked_workers()) >= 3)
        assert ray_nodes._marked_workers()[worker.pid] == mine
        ray_nodes._end_orphans()
        assert orphan.wait(timeout=120) == -signal.SIGKILL
        assert worker.poll() is None
        ray_nodes._end_workers(mine)
        assert worker.wait(timeout=120) == -signal.SIGKILL
        assert [one.poll() for one in others] == [None, None]
    finally:
        for one in (worker, orphan, *others):
            one.kill()
            one.wait()


# Order of a cluster's tasks, and its leader.


@pytest.mark.parametrize(
    ("cluster", "leader"),
    [
        ({"ps": ["a:1"], "worker": ["b:1"], "chief": ["c:1"]}, ("chief", 0)),
        ({"ps": ["a:1"], "worker": {1: "b:1", 2: "c:1"}}, ("worker", 1)),
        ({"ps": ["a:1", "b:1"], "evaluator": ["c:1"]}, ("ps", 0)),
    ],
)
def test_leader_is_the_chief_or_the_first_worker(cluster, leader) -> None:
    assert leader_of(ClusterSpec(cluster)) == leader


def test_all_tasks_are_named() -> None:
    spec = ClusterSpec({"evaluator": ["e:1"], "ps": ["p:1"], "worker": {0: "a:1", 2: "b:1"}})
    assert tasks_of(spec) == [("worker", 0), ("worker", 2), ("ps", 0), ("evaluator", 0)]

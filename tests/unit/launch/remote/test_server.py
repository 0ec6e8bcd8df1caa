"""Server of a task: the nodes it starts, and its errors."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import UnavailableError
from stratagem.launch.remote import server
from stratagem.launch.remote.server import Server, ServerDef, run_standard_server

CLUSTER = {"chief": ["127.0.0.1:2222"], "worker": ["b:1", "c:1"]}


class Node:
    """In place of a node of Ray."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def wait(self) -> None:
        self.said.append("wait")

    def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def started(monkeypatch) -> list[tuple[Any, ...]]:
    """What was started, and the nodes."""
    calls: list[tuple[Any, ...]] = []

    def start(kind: str) -> Any:
        def record(*arguments: Any, **options: Any) -> Node:
            node = Node()
            calls.append((kind, arguments, options, node))
            return node

        return record

    monkeypatch.setattr(server, "start_head", start("head"))
    monkeypatch.setattr(server, "join_as_node", start("node"))
    monkeypatch.setattr(server, "_require_free", lambda address: None)
    return calls


def test_leader_starts_the_head_and_others_join_it(started) -> None:
    with Server(CLUSTER, "chief", jobs_port=8000) as leader:
        assert leader.target == "grpc://127.0.0.1:2222"
        leader.start()
        with pytest.raises(UnavailableError, match="Ray ended on this machine, the leader"):
            leader.join()
    Server(ClusterSpec(CLUSTER), job_name="worker", task_index=1).join()
    (kind, arguments, options, node), other = started
    assert (kind, arguments) == ("head", ("127.0.0.1:2222",))
    assert options == {"task_type": "chief", "task_index": 0, "jobs_port": 8000}
    assert node.said == ["wait", "close"]
    assert other[:3] == ("node", ("127.0.0.1:2222", "worker", 1), {"host": "c"})


def test_port_for_jobs_may_stand_in_the_environment(started, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOBS_PORT", "9999")
    Server(CLUSTER, "chief")
    assert started[0][2]["jobs_port"] == 9999


def test_server_that_is_not_to_start_waits_for_it(started) -> None:
    made = Server(CLUSTER, "worker", 0, start=False)
    made.join()
    made.close()
    assert started == []
    assert made.server_def == ServerDef(ClusterSpec(CLUSTER).as_cluster_def(), "worker", 0, "grpc")
    made.start()
    assert len(started) == 1


def test_definition_of_a_server_is_one_too(started) -> None:
    made = Server(CLUSTER, "worker", 1, start=False)
    assert Server(made.server_def, start=False).server_def == made.server_def
    assert Server(made.server_def, task_index=0, start=False).server_def.task_index == 0


def test_only_task_need_not_be_named(started) -> None:
    made = Server({"ps": ["a:1"]}, start=False).server_def
    assert (made.job_name, made.task_index) == ("ps", 0)


def test_local_server_has_a_cluster_of_its_own(started, monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    made = Server.create_local_server()
    assert made.target.startswith("grpc://127.0.0.1:")
    assert started[0][0] == "head"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((CLUSTER,), ValueError, "job_name was not given, but there are several"),
        ((CLUSTER, "worker"), ValueError, "task_index was not given, but there are several"),
        ((CLUSTER, "worker", 2), ValueError, "Task id 2 of 'worker' is not in the cluster"),
        ((CLUSTER, "ps"), ValueError, "Task type 'ps' is not in the cluster"),
        (({},), ValueError, "has no task"),
        ((CLUSTER, "chief", 0, "udp"), ValueError, "Server received protocol='udp'"),
        ((CLUSTER, "chief", 0, None, 3), ValueError, "Server received config=3"),
        ((3,), TypeError, "server_or_cluster_def=3 is of type int"),
    ],
)
def test_wrong_task_is_refused(arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        Server(*arguments)


def test_taken_port_is_reported(monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port of 127.0.0.1:{port} is in use"):
            Server({"chief": [f"127.0.0.1:{port}"]})


def test_standard_server_is_that_of_the_environment(started, monkeypatch) -> None:
    config = {"cluster": CLUSTER, "task": {"type": "worker", "index": "1"}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    assert run_standard_server().server_def.task_index == 1
    assert started[0][1] == ("127.0.0.1:2222", "worker", 1)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"cluster": CLUSTER},
        {"cluster": CLUSTER, "task": {"type": "worker"}},
        {"task": {"type": "worker", "index": 0}},
    ],
)
def test_standard_server_needs_cluster_and_task(monkeypatch, config) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match="TF_CONFIG has the cluster"):
        run_standard_server()

"""Nodes of a job: waiting for them, and the tasks that each gets."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.nodes import launch_nodes as job_nodes
from stratagem.launch.nodes.launch_nodes import JobNodes
from stratagem.launch.nodes.rendezvous import MeetingPoint, Node
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import TaskPlan


class Meeting:
    """A rendezvous whose nodes answer at once, and which notes what is sent."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = list(nodes)
        self.sent: list[tuple[int, dict[str, Any]]] = []

    @property
    def lost(self) -> list[Node]:
        return [node for node in self.nodes if node.reason]

    def members(self) -> list[Node]:
        return [node for node in self.nodes if not node.reason]

    def send(self, node: Node, message: dict[str, Any]) -> None:
        self.sent.append((node.rank, message))
        if message["kind"] == "ports":
            first = 1000 * (node.rank + 1)
            node.ports[message["start"]] = list(range(first, first + message["count"]))


def node(rank: int, workers: int = 1, input_workers: int = 0) -> Node:
    return Node(
        rank=rank,
        host=f"h{rank}",
        address=f"10.0.0.{rank}",
        workers=workers,
        input_workers=input_workers,
        token="",
        writer=mock.Mock(),
        received_s=0.0,
    )


def nodes_of(meeting: Any, least: int, most: int, said: list[str] | None = None, **options):
    point = MeetingPoint(least=least, most=most, rank=0, host="a", port=29400)
    say = [].extend if said is None else said.extend
    return JobNodes(meeting, point, LaunchOptions(**options), say)


def plan_own(tasks, *, cluster) -> tuple[TaskPlan, ...]:
    return tuple(
        TaskPlan(task_type=kind, index=index, command=("run",), variables={"C": str(cluster)})
        for kind, index in tasks
    )


@pytest.fixture(autouse=True)
def limits(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "60")
    monkeypatch.setattr(job_nodes, "_POLL_S", 0.0)


def test_tasks_are_placed_on_the_nodes_that_joined(monkeypatch) -> None:
    monkeypatch.setattr(job_nodes, "free_ports", lambda count: range(1, 1 + count))
    said: list[str] = []
    meeting = Meeting(node(1, workers=2), node(2))
    nodes = nodes_of(meeting, 3, 3, said, ps=1)
    assert nodes.wait(1, lambda: False) == 4
    plans = nodes.begin(7, plan_own, is_warm=True)
    cluster = {
        "worker": ["a:1", "10.0.0.1:2000", "10.0.0.1:2001", "10.0.0.2:3000"],
        "ps": ["a:2"],
    }
    assert [(plan.name, plan.node.split()[1], plan.command) for plan in plans] == [
        ("worker 0", "0", ("run",)),
        ("worker 1", "1", ()),
        ("worker 2", "1", ()),
        ("worker 3", "2", ()),
        ("ps 0", "0", ("run",)),
    ]
    assert plans[0].variables == {"C": str(cluster)}
    start = {"kind": "start", "start": 0, "restart": 7, "cluster": cluster, "is_warm": True}
    assert meeting.sent[2:] == [
        (1, {**start, "tasks": [("worker", 1), ("worker", 2)]}),
        (2, {**start, "tasks": [("worker", 3)]}),
    ]
    assert said[0].startswith("4 workers on 3 nodes: node 0 (")
    assert said[0].endswith("), node 1 (h1), node 2 (h2).")
    assert nodes.running_task(plans[0]) is None
    remote = nodes.running_task(plans[3])
    assert remote is not None
    meeting.nodes[1].reason = "no answer"
    assert remote.process.reason == "no answer"


def test_each_node_with_input_workers_has_a_task_for_them(monkeypatch) -> None:
    monkeypatch.setattr(job_nodes, "free_ports", lambda count: range(1, 1 + count))
    meeting = Meeting(node(1, input_workers=2), node(2, input_workers=8))
    nodes = nodes_of(meeting, 3, 3)
    nodes.wait(1, lambda: False)
    plans = nodes.begin(0, plan_own, is_warm=False)
    services = [plan for plan in plans if plan.task_type == "input"]
    assert [(plan.name, plan.node.split()[1]) for plan in services] == [
        ("input 0", "1"),
        ("input 1", "2"),
    ]
    assert not any(plan.trains for plan in services)
    (_, message), _ = meeting.sent[2:]
    assert message["cluster"]["input"] == ["10.0.0.1:2001", "10.0.0.2:3001"]
    assert message["tasks"] == [("worker", 1), ("input", 0)]


def test_fewer_nodes_are_enough_after_the_last_call(monkeypatch) -> None:
    meeting = Meeting(node(1))
    nodes = nodes_of(meeting, 2, 3)
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.05")  # comes before the last call here
    with pytest.raises(UnavailableError):
        nodes.wait(1, lambda: False)
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "60")
    monkeypatch.setattr(job_nodes, "_LAST_CALL_S", 0.0)
    assert nodes.wait(1, lambda: False) == 2
    nodes.begin(0, plan_own, is_warm=False)
    meeting.nodes.append(node(2))
    assert nodes.num_workers() == 3
    assert nodes.wait(1, lambda: False) == 3


def test_restart_waits_for_the_least_number_only() -> None:
    meeting = Meeting(node(1), node(2))
    nodes = nodes_of(meeting, 2, 3)
    assert nodes.wait(1, lambda: False) == 3
    nodes.begin(0, plan_own, is_warm=False)
    meeting.nodes[0].reason = "no answer"
    assert nodes.wait(1, lambda: False) == 2
    assert meeting.sent[-1] == (2, {"kind": "ports", "start": 1, "count": 1})


def test_missing_nodes_are_named_with_the_limit(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.05")
    lost = node(1)
    lost.reason = "no answer from its node for 15 s"
    words = (
        r"2 of 4 nodes are at a:29400; missing for 0\.05 s: node 1 \(h1\): no answer from its node "
        r"for 15 s; node 3\.(?s:.)*at least 4 nodes within STRATAGEM_JOIN_TIMEOUT_S"
    )
    with pytest.raises(UnavailableError, match=words):
        nodes_of(Meeting(lost, node(2)), 4, 4).wait(1, lambda: False)


def test_waiting_ends_with_the_launcher() -> None:
    assert nodes_of(Meeting(), 2, 2).wait(1, lambda: True) == 0


def test_node_that_is_lost_while_it_looks_for_ports_is_not_waited_for(monkeypatch) -> None:
    class Losing(Meeting):
        def send(self, node: Node, message: dict[str, Any]) -> None:
            if node.rank == 1:
                node.reason = "no answer"
            super().send(node, message)
            node.ports.clear() if node.rank == 1 else None

    monkeypatch.setattr(job_nodes, "_LAST_CALL_S", 0.0)
    assert nodes_of(Losing(node(1), node(2)), 2, 3).wait(1, lambda: False) == 2

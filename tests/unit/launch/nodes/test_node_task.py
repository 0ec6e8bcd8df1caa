"""Task of another node: what has arrived about it, and what is sent to it."""

from __future__ import annotations

import signal
from typing import Any
from unittest import mock

import pytest

from stratagem.launch.nodes.launch_nodes import NodeTask
from stratagem.launch.nodes.rendezvous import Node
from stratagem.launch.plan.task_plan import TaskPlan

PLAN = TaskPlan(task_type="worker", index=2, command=(), variables={}, node="node 1 (b)")


@pytest.fixture
def node() -> Node:
    writer: Any = mock.Mock()
    return Node(
        rank=1,
        host="b",
        address="",
        workers=1,
        input_workers=0,
        token="",
        writer=writer,
        received_s=0.0,
    )


@pytest.fixture
def sent() -> list[dict[str, Any]]:
    return []


@pytest.fixture
def task(node, sent) -> NodeTask:
    return NodeTask(PLAN, node, 4, sent.append)


def test_running_task_has_not_ended(task) -> None:
    assert task.returncode() is None
    assert not task.look_for_members()
    assert (task.reason, task.last_lines()) == ("", ())


def test_end_of_another_start_is_not_its_end(node, task) -> None:
    node.exits[3, "worker 2"] = {"returncode": 1, "lines": ()}
    node.gone.add((3, "worker 2"))
    assert task.returncode() is None
    assert not task.look_for_members()


def test_end_arrives_before_the_last_process_is_gone(node, task) -> None:
    node.exits[4, "worker 2"] = {"returncode": -9, "lines": ("x",), "reason": "killed"}
    assert (task.returncode(), task.last_lines(), task.reason) == (-9, ("x",), "killed")
    assert not task.look_for_members()
    node.gone.add((4, "worker 2"))
    assert task.look_for_members()
    assert task.is_gone


def test_task_is_lost_with_its_node(node, task) -> None:
    node.reason = "no answer"
    assert (task.returncode(), task.reason) == (-signal.SIGKILL, "no answer")
    assert task.look_for_members()


def test_task_that_ended_before_its_node_was_lost_has_its_own_end(node, task) -> None:
    node.exits[4, "worker 2"] = {"returncode": 3, "lines": ("x",)}
    node.reason = "no answer"
    assert (task.returncode(), task.reason) == (3, "")


def test_signals_are_sent_and_remembered(task, sent) -> None:
    task.send(signal.SIGTERM)
    assert task.signals == {signal.SIGTERM}
    assert sent == [{"kind": "signal", "start": 4, "task": "worker 2", "signum": 15}]

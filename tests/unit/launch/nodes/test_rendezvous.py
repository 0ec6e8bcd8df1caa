"""Rendezvous and links in one process: greetings, refusals, losses and the end."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.cluster.addresses import free_ports
from stratagem.group.authentication.connections import frame
from stratagem.group.authentication.secret import Credentials, Secret
from stratagem.launch.nodes.agent import NodeLink
from stratagem.launch.nodes.launch_nodes import NodeTask
from stratagem.launch.nodes.rendezvous import (
    _INVALID,
    MeetingPoint,
    Node,
    Rendezvous,
    _record,
    beat_s,
)
from stratagem.launch.nodes.ssh_launch import VARIABLE
from stratagem.launch.plan.task_plan import TaskPlan
from tests.fuzzing import JSON, fuzz
from tests.unit.group.authentication.certificates import make_certificates
from tests.unit.group.authentication.peers import admit, dialed, key, prove
from tests.unit.launch.waiting import until

HELLO = {"token": "t", "rank": 1, "workers": 2, "input_workers": 0, "nnodes": [2, 3]}


@pytest.fixture
def point() -> MeetingPoint:
    (port,) = free_ports(1)
    return MeetingPoint(least=2, most=3, rank=0, host="127.0.0.1", port=port)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def rendezvous(point, said):
    with Rendezvous(point, 60.0, said.extend) as made:
        yield made


@pytest.fixture
def join(point):
    """Connects as a node; the greeting may be changed."""
    links: list[NodeLink] = []

    def connect(**changes) -> NodeLink:
        link = NodeLink(point, HELLO | changes, timeout_s=60.0, join_s=60.0)
        links.append(link)
        return link

    yield connect
    for link in links:
        link.close()


def next_of(link: NodeLink) -> dict:
    message = link.take(60.0)
    assert message is not None
    return message


def test_node_joins_sends_messages_and_receives_them(rendezvous, join, said) -> None:
    link = join()
    assert next_of(link) == {"kind": "welcome", "rank": 1}
    (node,) = rendezvous.members()
    assert (node.rank, node.workers, node.address) == (1, 2, "127.0.0.1")
    assert node.label == f"node 1 ({socket.gethostname()})"
    assert said == [f"{node.label} joined: 2 of 3 nodes."]
    rendezvous.send(node, {"kind": "ports", "start": 0, "count": 2})
    assert next_of(link) == {"kind": "ports", "start": 0, "count": 2}
    link.send({"kind": "ports", "start": 0, "ports": [1, 2]})
    link.send({"kind": "exited", "start": 0, "task": "worker 1", "returncode": 3, "lines": ["x"]})
    link.send({"kind": "gone", "start": 0, "task": "worker 1"})
    until(lambda: (0, "worker 1") in node.gone)
    assert node.ports == {0: [1, 2]}
    assert node.exits[0, "worker 1"]["returncode"] == 3
    assert node.exits[0, "worker 1"]["lines"] == ("x",)


def test_ranks_are_assigned_to_nodes_without_one(rendezvous, join) -> None:
    assert next_of(join(token="a", rank=2))["rank"] == 2
    assert next_of(join(token="b", rank=None))["rank"] == 1
    assert next_of(join(token="c", rank=None)) == {
        "kind": "refused",
        "text": "All 3 nodes have already joined.",
        "is_final": False,
    }


@pytest.mark.parametrize("changes", [{"nnodes": [3, 3]}, {"rank": 3}, {"rank": 0}])
def test_node_of_another_command_is_refused(rendezvous, join, changes) -> None:
    refusal = next_of(join(**changes))
    assert refusal["is_final"]
    assert "asked to join a job of --nnodes 2:3" in refusal["text"]
    assert not rendezvous.members()


def test_rank_that_is_taken_may_be_free_later(rendezvous, join) -> None:
    next_of(join())
    refusal = next_of(join(token="another"))
    assert "has already joined" in refusal["text"]
    assert not refusal["is_final"]


def test_node_that_connects_again_takes_its_place(rendezvous, join) -> None:
    next_of(join())
    (before,) = rendezvous.members()
    next_of(join(workers=3))
    (after,) = rendezvous.members()
    assert (before.reason, after.workers) == ("its node connected again", 3)


def test_node_that_closes_its_connection_is_lost(rendezvous, join, said) -> None:
    link = join()
    next_of(link)
    (node,) = rendezvous.members()
    link.close()
    until(lambda: not rendezvous.members())
    assert "closed the connection" in node.reason
    assert rendezvous.lost == [node]
    until(lambda: said[1:] == [f"{node.label} is lost: {node.reason}."])


def test_node_that_leaves_is_no_member_and_is_not_missed(rendezvous, join, said) -> None:
    link = join()
    next_of(link)
    (node,) = rendezvous.members()
    link.send({"kind": "leaving"})
    until(lambda: node.is_leaving)
    assert rendezvous.members() == []
    link.close()
    until(lambda: node.reason)
    assert len(said) == 1


def proven(point: MeetingPoint) -> socket.socket:
    """Connects to a rendezvous without a secret."""
    connected = dialed(point.port)
    prove(connected, key("rendezvous"), "node")
    return connected


def greeted(point: MeetingPoint) -> socket.socket:
    """Connects and greets, and then sends no heartbeats."""
    connected = proven(point)
    connected.sendall(frame({"kind": "hello", "host": "h", "address": "10.0.0.2", **HELLO}))
    return connected


def test_silent_node_is_lost_with_the_limit_and_its_option(point, said) -> None:
    with Rendezvous(point, 0.2, said.extend) as rendezvous, greeted(point):
        until(lambda: rendezvous.lost)
        assert rendezvous.lost[0].label == "node 1 (h)"
        assert rendezvous.lost[0].reason == (
            "no answer from its node for 0.2 s, the limit of --node-timeout-s"
        )


def test_heartbeats_are_well_within_the_limit() -> None:
    assert beat_s(15.0) == 1.0
    assert beat_s(1.0) == 0.2


@pytest.mark.parametrize(
    "message",
    [{}, {"kind": "ports"}, {"kind": "exited", "returncode": "x"}, {"kind": "gone", "start": []}],
)
def test_invalid_message_ends_the_connection(point, rendezvous, message) -> None:
    with greeted(point) as connected:
        until(rendezvous.members)
        connected.sendall(frame(message))
        until(lambda: not rendezvous.members())


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", frame({"kind": "hello"}), frame({**HELLO, "rank": "1"})]
)
def test_other_programs_are_no_nodes(point, rendezvous, data) -> None:
    with proven(point) as connected:
        connected.sendall(data)
        assert connected.recv(1) == b""
    assert not rendezvous.members()


def test_rank_that_is_no_number_is_refused(rendezvous) -> None:
    with pytest.raises(TypeError, match=r"the rank 1\.5 is no number"):
        rendezvous._admit({"kind": "hello", **HELLO, "rank": 1.5}, _Writer())


def test_end_reaches_nodes_and_those_that_come_later(rendezvous, join, monkeypatch) -> None:
    monkeypatch.setattr("stratagem.launch.nodes.rendezvous._END_S", 0.1)
    link = join()
    next_of(link)
    end = {"kind": "end", "error": "", "cause": None}
    rendezvous.end(end)  # the node stays, and this returns nevertheless
    assert next_of(link) == end
    assert next_of(join(token="late")) == end


def test_port_that_is_taken_is_named(point, rendezvous) -> None:
    with pytest.raises(ValueError, match=rf"cannot listen on port {point.port}(?s:.)*--rdzv-end"):
        Rendezvous(point, 60.0, print)


def test_frames_on_the_wire_are_json(point, rendezvous) -> None:
    with greeted(point) as connected:
        size = int.from_bytes(connected.recv(4), "big")
        assert json.loads(connected.recv(size)) == {"kind": "welcome", "rank": 1}


class _Writer:
    """Writes to nobody."""

    def write(self, data: bytes) -> None:
        assert data

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        pass


def _node(writer: Any) -> Node:
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


def _changed(messages: list[dict], names: list[str]) -> st.SearchStrategy[dict]:
    return st.builds(
        lambda message, name, value: {**message, name: value},
        st.sampled_from(messages),
        st.sampled_from(names),
        JSON,
    )


_HELLOS = _changed(
    [{"kind": "hello", "host": "h", "address": "a", **HELLO}],
    ["rank", "workers", "input_workers", "nnodes", "token", "host"],
)
_RECORDS = _changed(
    [
        {"kind": "ports", "start": 0, "ports": [1]},
        {"kind": "exited", "start": 0, "task": "worker 1", "returncode": 1, "lines": []},
        {"kind": "gone", "start": 0, "task": "worker 1"},
        {"kind": "leaving"},
    ],
    ["kind", "start", "ports", "task", "returncode", "lines"],
)


@pytest.mark.slow
@fuzz
@given(st.lists(_HELLOS, max_size=10), st.lists(_RECORDS, max_size=10))
def test_any_message_is_recorded_or_invalid(rendezvous, hellos, records) -> None:
    for hello in hellos:
        with contextlib.suppress(*_INVALID):
            rendezvous._admit(hello, _Writer())
    rendezvous._nodes.clear()
    node = _node(_Writer())
    for record in records:
        with contextlib.suppress(*_INVALID):
            _record(node, record)


# Connection of a node: no node 0, and one that falls silent or goes away.


def point_of(port: int) -> MeetingPoint:
    return MeetingPoint(least=2, most=2, rank=1, host="127.0.0.1", port=port)


@contextlib.contextmanager
def connected(timeout_s: float) -> Iterator[tuple[NodeLink, socket.socket]]:
    """A link, and the other end of its connection, on which nothing is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        point = point_of(server.getsockname()[1])
        with NodeLink(point, {}, timeout_s=timeout_s, join_s=60.0) as link:
            other, _ = server.accept()
            with other:
                assert admit(other, key("rendezvous")) == "node"
                yield link, other


def test_absence_of_node_0_is_reported_after_the_limit() -> None:
    with NodeLink(point_of(*free_ports(1)), {}, timeout_s=60.0, join_s=0.0) as link:
        message = next_of(link)
    assert message["kind"] == "absent"
    assert "refused" in message["reason"] or "Connect call failed" in message["reason"]


def test_silence_of_node_0_names_the_limit() -> None:
    with connected(timeout_s=0.2) as (link, _):
        reason = "no answer from node 0 for 0.2 s, the limit of --node-timeout-s"
        assert link.take(60.0) == {"kind": "lost", "reason": reason}


@pytest.mark.parametrize("data", [b"", b"\xff" * 8])
def test_end_of_the_connection_or_an_invalid_frame_is_a_loss(data) -> None:
    with connected(timeout_s=60.0) as (link, other):
        other.sendall(data)
        other.shutdown(socket.SHUT_RDWR)
        message = next_of(link)
    assert message["kind"] == "lost"
    assert "node 0 closed the connection" in message["reason"]


def test_nothing_to_take_and_nowhere_to_send_is_no_error() -> None:
    with connected(timeout_s=60.0) as (link, _):
        assert link.take(0) is None
    link.send({"kind": "beat"})


def test_other_program_at_the_address_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        point = point_of(server.getsockname()[1])
        with NodeLink(point, {}, timeout_s=60.0, join_s=60.0) as link:
            other, _ = server.accept()
            with other:
                other.sendall(b"220 mail.example.org\r\n")
                message = next_of(link)
    assert (message["kind"], message["is_final"]) == ("refused", True)
    assert f"Another program has taken port {point.port} of node 0" in message["text"]


def test_node_with_another_secret_is_refused_at_once() -> None:
    point = point_of(*free_ports(1))
    credentials = Credentials(Secret("a" * 32))
    with (
        Rendezvous(point, 60.0, print, Credentials(Secret("b" * 32))) as rendezvous,
        NodeLink(point, {}, credentials, timeout_s=60.0, join_s=60.0) as link,
    ):
        message = next_of(link)
        assert rendezvous.members() == []
    assert "do not have the same secret" in message["text"]


def test_nodes_with_certificates_meet(monkeypatch, tmp_path) -> None:
    for name, text in make_certificates(tmp_path).items():
        monkeypatch.setenv(name, text)
    credentials = Credentials.find("This launcher", ["127.0.0.1"])
    hello = {"token": "t", "rank": 1, "workers": 1, "input_workers": 0, "nnodes": [2, 2]}
    point = point_of(*free_ports(1))
    with (
        Rendezvous(point, 60.0, print, credentials),
        NodeLink(point, hello, credentials, timeout_s=60.0, join_s=60.0) as link,
    ):
        assert link.take(60.0) == {"kind": "welcome", "rank": 1}


# Task of another node: what has arrived about it, and what is sent to it.

PLAN = TaskPlan(task_type="worker", index=2, command=(), variables={}, node="node 1 (b)")


@pytest.fixture
def node() -> Node:
    return _node(mock.Mock())


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


# Standard input of a launcher that was started by SSH.

PROGRAM = """
import os, signal, sys, time
from stratagem.launch.nodes import ssh_launch as ssh_lease
ssh_lease._LIMIT_S, ssh_lease._LEASE_MARGIN_S = map(float, sys.argv[1:])
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, lambda signum, frame: print(signum, flush=True))
ssh_lease.hold_lease(0.0)
print(os.environ.get("STRATAGEM_SSH_LEASE"), flush=True)
time.sleep(1000)
"""


@pytest.fixture
def leased(monkeypatch):
    """Starts a program that holds a lease, and reads its first line."""
    monkeypatch.setenv(VARIABLE, "1")
    started: list[subprocess.Popen[str]] = []

    def start(limit_s: float, margin_s: float) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(limit_s), str(margin_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "None\n"  # children do not get the variable
        return process

    yield start
    for process in started:
        process.kill()
        with process:  # closes its pipes
            pass


@pytest.mark.slow
def test_lines_are_signals_and_the_end_is_a_notice_and_then_a_kill(leased) -> None:
    process = leased(60.0, 0.2)
    process.stdin.write(f"\n{int(signal.SIGUSR1)}\n\n")
    process.stdin.flush()
    assert process.stdout.readline() == f"{int(signal.SIGUSR1)}\n"
    process.stdin.close()
    assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.slow
def test_silence_is_an_end(leased) -> None:
    process = leased(0.1, 0.0)
    assert process.wait(60) == -signal.SIGKILL

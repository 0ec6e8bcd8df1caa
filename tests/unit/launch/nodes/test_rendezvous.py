"""Rendezvous and links in one process: greetings, refusals, losses and the end."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.group.protocol import frame
from stratagem.launch.nodes.agent import NodeLink
from stratagem.launch.nodes.rendezvous import (
    _INVALID,
    MeetingPoint,
    Node,
    Rendezvous,
    _record,
    beat_s,
)
from stratagem.launch.plan.ports import free_ports
from tests.fuzzing import JSON, fuzz
from tests.unit.group.authentication.peers import dialed, key, prove
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
    node = Node(
        rank=1,
        host="h",
        address="a",
        workers=1,
        input_workers=0,
        token="t",
        writer=_Writer(),
        received_s=0.0,
    )
    for record in records:
        with contextlib.suppress(*_INVALID):
            _record(node, record)

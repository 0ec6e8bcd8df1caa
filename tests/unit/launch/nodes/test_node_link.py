"""Connection of a node: no node 0, and one that falls silent or goes away."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from stratagem.group.authentication.secret import Credentials, Secret
from stratagem.launch.nodes.agent import NodeLink
from stratagem.launch.nodes.rendezvous import MeetingPoint, Rendezvous
from stratagem.launch.plan.ports import free_ports
from tests.unit.group.authentication.certificates import make_certificates
from tests.unit.group.authentication.peers import admit, key


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
        message = link.take(60.0)
    assert message is not None
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
        message = link.take(60.0)
    assert message is not None
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
                message = link.take(60.0)
    assert message is not None
    assert (message["kind"], message["is_final"]) == ("refused", True)
    assert f"Another program has taken port {point.port} of node 0" in message["text"]


def test_node_with_another_secret_is_refused_at_once() -> None:
    point = point_of(*free_ports(1))
    credentials = Credentials(Secret("a" * 32))
    with (
        Rendezvous(point, 60.0, print, Credentials(Secret("b" * 32))) as rendezvous,
        NodeLink(point, {}, credentials, timeout_s=60.0, join_s=60.0) as link,
    ):
        message = link.take(60.0)
        assert rendezvous.members() == []
    assert message is not None
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

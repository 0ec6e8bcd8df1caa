"""Connection of a node: no node 0, and one that falls silent or goes away."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from stratagem.launch.nodes.meeting_point import MeetingPoint
from stratagem.launch.nodes.node_link import NodeLink
from stratagem.launch.plan.ports import free_ports


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

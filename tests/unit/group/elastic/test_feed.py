"""Messages to members that read late."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import pytest

from stratagem.group.elastic.peer_connections import Feed


@pytest.fixture
def pair() -> Iterator[tuple[Feed, socket.socket]]:
    own, other = socket.socketpair()
    own.settimeout(0)
    feed = Feed({1: own})
    yield feed, other
    feed.close()
    own.close()
    other.close()


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += connection.recv(size - len(data))
    return bytes(data)


def test_messages_arrive_in_order_while_the_sender_goes_on(pair) -> None:
    feed, other = pair
    large = bytes(range(256)) * 20_000  # more than the system buffers
    assert feed.free_of([1, 2]) == [1, 2]
    for message in (b"first", large, b"last"):
        feed.send([1], message)
    assert feed.is_busy(1)
    assert feed.free_of([1, 2]) == [2]
    assert _read(other, len(large) + 9) == b"first" + large + b"last"
    feed.finish(10)
    assert not feed.is_busy(1)


def test_the_wait_for_one_that_does_not_read_is_limited(pair) -> None:
    feed, _ = pair
    feed.send([1], bytes(10_000_000))
    feed.finish(0.05)
    assert feed.is_busy(1)


def test_messages_for_a_lost_member_are_dropped(pair) -> None:
    feed, other = pair
    other.close()
    feed.send([1], bytes(10_000_000))
    deadline = time.monotonic() + 120
    while feed.is_busy(1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not feed.is_busy(1)


def test_without_messages_there_is_no_thread(pair) -> None:
    feed, _ = pair
    assert feed._thread is None
    assert not feed.is_busy(1)

"""Lines to servers: by TCP first, then by the Unix socket that the server has told of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import ConnectionPool, ConnectionSet, Question, wait
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.local_sockets import LocalSocket
from stratagem.group.transport.server_connections import Peer, Place
from stratagem.group.transport.wire import Message, pack
from tests.unit.group.transport.cut_connection import CutLine

NUMBER = bytes(7) + b"\1"


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.make()


@pytest.fixture
def listener(keys) -> Iterator[Listener]:
    def handle(request: Request) -> None:
        request.answer(request.message)

    with Listener(keys, handle) as listener:
        yield listener


@pytest.fixture
def peer(listener) -> Peer:
    return Peer("Server 0", listener.address)


@pytest.fixture
def connections(keys, peer) -> Iterator[ConnectionSet]:
    pool = ConnectionPool(keys, [peer])
    connections = ConnectionSet(pool)
    yield connections
    connections.close()
    pool.close()
    pool.end()


def ask(connections: ConnectionSet) -> None:
    frames = pack(Message("x"))
    connection = connections.to(0)
    question = Question(
        connection, NUMBER, frames, locate=lambda: None, silence_s=30.0, limit_s=30.0
    )
    wait([question], connections)
    assert question.answer == Message("x", {}, [])


def test_unix_socket_is_used_from_the_second_request(connections, peer, listener) -> None:
    ask(connections)
    assert connections.to(0).place == peer.place == Place(listener.address, listener.local)
    assert connections.to(0).socket.last_endpoint == listener.local.address.encode()
    ask(connections)
    assert connections.to(0).place.local == listener.local


def test_server_without_one_is_asked_by_tcp(keys, monkeypatch) -> None:
    monkeypatch.setattr(LocalSocket, "make", lambda: None)
    with Listener(keys, lambda request: request.answer(request.message)) as listener:
        pool = ConnectionPool(keys, [Peer("Server 0", listener.address)])
        connections = ConnectionSet(pool)
        for _ in range(2):
            ask(connections)
            assert connections.to(0).place == Place(listener.address)
        connections.close()
        pool.end()


def test_line_that_was_refused_sends_nothing_and_does_not_wait(connections, peer, listener) -> None:
    peer.place = Place(listener.address, LocalSocket(listener.local.path, b"not the password"))
    connection = connections.to(0)
    while connection.socket.poll(10, zmq.POLLOUT):  # until the connection is gone
        pass
    connection.send(NUMBER, pack(Message("x")))
    connection.ping(NUMBER, b"token")
    assert not connection.socket.poll(100)


def test_unix_socket_of_another_machine_is_not_used(connections, peer, monkeypatch) -> None:
    monkeypatch.setattr(LocalSocket, "is_reachable", lambda self: False)
    for _ in range(2):
        ask(connections)
        assert peer.place.local is None


def test_unix_socket_by_which_nothing_was_heard_is_left_for_good(
    connections, peer, listener
) -> None:
    ask(connections)
    connections.to(0).leave_dead_socket()
    for _ in range(2):
        ask(connections)
        assert peer.place == Place(listener.address)


def test_busy_server_is_not_left_while_its_unix_socket_is_there(
    connections, peer, listener
) -> None:
    for _ in range(2):
        ask(connections)
    connections.to(0).leave_dead_socket()
    assert peer.place.local == listener.local
    listener.local.remove()
    connection = connections.to(0)
    connection.leave_dead_socket()
    assert connection.is_astray
    assert not connection.is_at_best
    ask(connections)
    assert connections.to(0).place == Place(listener.address)


def test_socket_whose_handshake_ends_after_that_of_the_next_takes_nothing_from_it(
    connections, peer, listener, monkeypatch
) -> None:
    """On busy cores ZeroMQ is late to close the old one, which then is still let in."""
    monkeypatch.setattr(LocalSocket, "is_reachable", lambda self: False)
    late = CutLine(listener.address, is_held=True)
    peer.move(late.address)
    connection = connections.to(0)
    with connection.socket as old:
        peer.move(listener.address)
        connection.open()
        ask(connections)
        late.release()
        assert old.poll(30_000)  # it was let in, and is told what it has asked
        ask(connections)
    ask(connections)
    late.close()


def test_what_an_old_address_tells_is_not_believed_of_the_new(peer, listener) -> None:
    old = peer.place.address
    peer.move("tcp://127.0.0.1:1")
    peer.note_local(old, listener.local)
    assert peer.place == Place("tcp://127.0.0.1:1")


def test_move_to_the_same_address_keeps_lines_and_takes_a_lost_server_back(
    connections, peer
) -> None:
    ask(connections)
    before = peer.place
    peer.abandon("it ended.")
    with pytest.raises(UnavailableError, match=r"Server 0 at tcp.* was lost: it ended\."):
        peer.require_present()
    peer.move(before.address)
    peer.require_present()
    assert peer.place is before


def test_set_that_is_woken_often_does_not_block_who_wakes_it(connections) -> None:
    for _ in range(100_000):  # more than its socket holds
        connections.wake()
    ask(connections)
    connections.end()
    with pytest.raises(UnavailableError, match="connections to the servers were closed before"):
        ask(connections)


def test_who_waits_for_a_server_that_is_given_up_gets_an_error_though_it_is_back_at_once() -> None:
    """Even before the thread that waits looks: what it has asked is not for the next process."""
    peer = Peer("Worker 0", "tcp://127.0.0.1:1")
    before = peer.num_losses
    peer.abandon("it ended.")
    peer.move("tcp://127.0.0.1:2")
    peer.require_present()  # who asks now asks the new one
    peer.require_present(peer.num_losses)
    with pytest.raises(UnavailableError, match="was lost: it ended"):
        peer.require_present(before)

"""Lines to servers: by TCP first, then by the Unix socket that the server has told of."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from stratagem.errors import UnavailableError
from stratagem.servers import ClusterKeys, Listener, Message, Request, pack
from stratagem.servers.lines import LineSet, Peer, Place
from stratagem.servers.local_sockets import LocalSocket
from stratagem.servers.waiting import Question, wait
from tests.servers.cut_line import CutLine

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
def lines(keys, peer) -> Iterator[LineSet]:
    with zmq.Context() as context:
        lines = LineSet(context, keys, [peer])
        yield lines
        lines.close()


def ask(lines: LineSet) -> None:
    frames = pack(Message("x"))
    line = lines.to(0)
    question = Question(line, NUMBER, frames, locate=lambda: None, silence_s=30.0, limit_s=30.0)
    wait([question], lines)
    assert question.answer == Message("x", {}, [])


def test_unix_socket_is_used_from_the_second_request(lines, peer, listener) -> None:
    ask(lines)
    assert lines.to(0).place == peer.place == Place(listener.address, listener.local)
    assert lines.to(0).socket.last_endpoint == listener.local.address.encode()
    ask(lines)
    assert lines.to(0).place.local == listener.local


def test_server_without_one_is_asked_by_tcp(keys, monkeypatch) -> None:
    monkeypatch.setattr(LocalSocket, "make", lambda: None)
    with (
        Listener(keys, lambda request: request.answer(request.message)) as listener,
        zmq.Context() as context,
    ):
        lines = LineSet(context, keys, [Peer("Server 0", listener.address)])
        for _ in range(2):
            ask(lines)
            assert lines.to(0).place == Place(listener.address)
        lines.close()


def test_line_that_was_refused_sends_nothing_and_does_not_wait(lines, peer, listener) -> None:
    peer.place = Place(listener.address, LocalSocket(listener.local.path, b"not the password"))
    line = lines.to(0)
    while line.socket.poll(10, zmq.POLLOUT):  # until the connection is gone
        pass
    line.send(NUMBER, pack(Message("x")))
    line.ping(NUMBER, b"token")
    assert not line.socket.poll(100)


def test_unix_socket_of_another_machine_is_not_used(lines, peer, monkeypatch) -> None:
    monkeypatch.setattr(LocalSocket, "is_reachable", lambda self: False)
    for _ in range(2):
        ask(lines)
        assert peer.place.local is None


def test_unix_socket_by_which_nothing_was_heard_is_left_for_good(lines, peer, listener) -> None:
    ask(lines)
    lines.to(0).leave_dead_socket()
    for _ in range(2):
        ask(lines)
        assert peer.place == Place(listener.address)


def test_busy_server_is_not_left_while_its_unix_socket_is_there(lines, peer, listener) -> None:
    for _ in range(2):
        ask(lines)
    lines.to(0).leave_dead_socket()
    assert peer.place.local == listener.local
    listener.local.remove()
    line = lines.to(0)
    line.leave_dead_socket()
    assert line.is_astray
    assert not line.is_at_best
    ask(lines)
    assert lines.to(0).place == Place(listener.address)


def test_socket_whose_handshake_ends_after_that_of_the_next_takes_nothing_from_it(
    lines, peer, listener, monkeypatch
) -> None:
    """On busy cores ZeroMQ is late to close the old one, which then is still let in."""
    monkeypatch.setattr(LocalSocket, "is_reachable", lambda self: False)
    late = CutLine(listener.address, is_held=True)
    peer.move(late.address)
    line = lines.to(0)
    with line.socket as old:
        peer.move(listener.address)
        line.open()
        ask(lines)
        late.release()
        assert old.poll(30_000)  # it was let in, and is told what it has asked
        ask(lines)
    ask(lines)
    late.close()


def test_what_an_old_address_tells_is_not_believed_of_the_new(peer, listener) -> None:
    old = peer.place.address
    peer.move("tcp://127.0.0.1:1")
    peer.note_local(old, listener.local)
    assert peer.place == Place("tcp://127.0.0.1:1")


def test_move_to_the_same_address_keeps_lines_and_takes_a_lost_server_back(lines, peer) -> None:
    ask(lines)
    before = peer.place
    peer.abandon("it ended.")
    with pytest.raises(UnavailableError, match=r"Server 0 at tcp.* was given up: it ended\."):
        peer.require_kept()
    peer.move(before.address)
    peer.require_kept()
    assert peer.place is before


def test_set_that_is_woken_often_does_not_block_who_wakes_it(lines) -> None:
    for _ in range(100_000):  # more than its socket holds
        lines.wake()
    ask(lines)
    lines.end()
    with pytest.raises(UnavailableError, match="by connections that are closed"):
        ask(lines)


def test_who_waits_for_a_server_that_is_given_up_gets_an_error_though_it_is_back_at_once() -> None:
    """Even before the thread that waits looks: what it has asked is not for the next process."""
    peer = Peer("Worker 0", "tcp://127.0.0.1:1")
    before = peer.num_losses
    peer.abandon("it ended.")
    peer.move("tcp://127.0.0.1:2")
    peer.require_kept()  # who asks now asks the new one
    peer.require_kept(peer.num_losses)
    with pytest.raises(UnavailableError, match="was given up: it ended"):
        peer.require_kept(before)

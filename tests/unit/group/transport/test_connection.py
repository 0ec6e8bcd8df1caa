"""Requests to parameter servers and their answers, over real sockets on this machine."""

from __future__ import annotations

import io
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq

from stratagem.errors import UnavailableError
from stratagem.group.transport import listener as module
from stratagem.group.transport.connection import (
    ConnectionPool,
    Connections,
    ConnectionSet,
    Peer,
    Question,
    ServerConnection,
    ServerError,
    wait,
)
from stratagem.group.transport.endpoints import ClusterKeys, Place
from stratagem.group.transport.journal import frames_in, last_frame_offset, record_at, write_record
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message, pack
from tests.unit.group.process_group.members import together
from tests.unit.group.transport.cut_connection import CutLine

Starts = Callable[..., Listener]


@pytest.fixture
def listen(keys) -> Iterator[Starts]:
    started: list[Listener] = []

    def start(handle: Callable[[Request], None], **options) -> Listener:
        started.append(Listener(keys, handle, **options))
        return started[-1]

    yield start
    for one in started:
        one.close()


def _echo(request: Request) -> None:
    message = request.message
    request.answer(Message(message.kind, message.fields, [array + 1 for array in message.arrays]))


def test_servers_are_asked_at_once_and_each_answers(listen, keys) -> None:
    listeners = [listen(_echo) for _ in range(3)]
    with Connections(keys, [one.address for one in listeners]) as connections:
        assert len(connections) == 3
        for size in (0, 1, 10**6):
            asked = {
                server: Message("x", {"server": server}, [np.full(size, server, np.float32)])
                for server in (2, 0)
            }
            answers = connections.ask_all(asked, timeout_s=120.0)
            assert sorted(answers) == [0, 2]
            for server, answer in answers.items():
                assert answer.fields == {"server": server}
                np.testing.assert_array_equal(answer.arrays[0], np.full(size, server + 1.0))


def test_threads_with_a_server_each_need_a_connection_each(listen, keys, monkeypatch) -> None:
    """A coordinator has two threads for each worker, and may have hundreds of workers."""
    opened: list[str] = []
    init = ServerConnection.__init__

    def counted(connection: ServerConnection, *parts: Any) -> None:
        opened.extend(part.name for part in parts if isinstance(part, Peer))
        init(connection, *parts)

    monkeypatch.setattr(ServerConnection, "__init__", counted)
    listener, num_servers = listen(_echo, num_threads=4), 12
    with Connections(keys, [listener.addresses] * num_servers) as connections:

        def ask(server: int) -> None:
            for _ in range(20):
                connections.ask(server, Message("x"), timeout_s=120.0)

        assert together(num_servers, ask) == [None] * num_servers
    assert sorted(opened) == sorted(f"Parameter server {i}" for i in range(num_servers))


def test_requests_of_different_connections_are_not_taken_for_each_other(listen, keys) -> None:
    both = threading.Barrier(2)

    def handle(request: Request) -> None:
        both.wait(120)
        _echo(request)

    listener = listen(handle)

    def ask(client: int) -> dict[str, Any]:
        with Connections(keys, [listener.addresses]) as connections:
            return connections.ask(0, Message("x", {"client": client}), timeout_s=120.0).fields

    assert together(2, ask) == [{"client": 0}, {"client": 1}]


def test_answers_may_come_later_and_in_another_order(listen, keys) -> None:
    """As of a step that waits for all workers, with fewer threads than workers."""
    waiting: list[Request] = []

    def handle(request: Request) -> None:
        waiting.append(request)
        if len(waiting) == 3:
            for one in waiting[::-1]:
                one.answer(Message("done", one.message.fields))
                one.answer(Message("once more"))  # not sent

    listener = listen(handle, num_threads=1)
    with Connections(keys, [listener.addresses]) as connections:

        def ask(thread: int) -> Message:
            return connections.ask(0, Message("wait", {"thread": thread}), timeout_s=120.0)

        assert [(one.kind, one.fields) for one in together(3, ask)] == [
            ("done", {"thread": thread}) for thread in range(3)
        ]


def test_error_of_a_server_is_raised_where_it_was_asked(listen, keys) -> None:
    def fail(request: Request) -> None:
        raise KeyError("no such variable")

    listener = listen(fail)
    with Connections(keys, [listener.addresses]) as connections:
        for _ in range(2):
            with pytest.raises(ServerError, match="Expected a request that the server") as raised:
                connections.ask(0, Message("x"), timeout_s=120.0)
            assert "raised KeyError: 'no such variable'" in str(raised.value)


def test_late_answer_is_not_taken_for_that_of_the_next_question(listen, keys) -> None:
    held: list[Request] = []

    def hold_first(request: Request) -> None:
        if request.message.kind == "connects":
            request.answer(request.message)
            return
        held.append(request)
        if len(held) > 1:
            held[0].answer(Message("late"))
            request.answer(Message("right"))

    listener = listen(hold_first)
    with Connections(keys, [listener.addresses]) as connections:
        connections.ask(0, Message("connects"))
        with pytest.raises(UnavailableError, match=r"gave no answer for 0\.2 s"):
            connections.ask(0, Message("x"), timeout_s=0.2)
        assert connections.ask(0, Message("x"), timeout_s=120.0).kind == "right"


def test_limit_of_0_s_is_not_the_default(keys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with (
        Connections(keys, [f"tcp://127.0.0.1:{port}"], silence_s=0) as connections,
        pytest.raises(UnavailableError, match="gave no answer for 0 s"),
    ):
        connections.ask(0, Message("x"), timeout_s=120.0)


def test_clients_without_the_keys_are_not_heard(listen, keys) -> None:
    heard: list[Message] = []

    def hear(request: Request) -> None:
        heard.append(request.message)
        _echo(request)

    listener = listen(hear)
    stranger = ClusterKeys.make()
    with (
        Connections(stranger, [listener.address]) as connections,
        pytest.raises(UnavailableError, match="with the keys of this cluster"),
    ):
        connections.ask(0, Message("x"), timeout_s=0.5)
    with zmq.Context() as context, context.socket(zmq.DEALER) as knows_server:
        knows_server.linger = 0
        stranger.unlock(knows_server)
        knows_server.curve_serverkey = keys.server_public
        knows_server.connect(listener.address)
        knows_server.send_multipart([b"12345678", b"{}"])
        assert not knows_server.poll(300)
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(listener.address)
        plain.send_multipart([b"12345678", b"{}"])
        assert not plain.poll(300)
    assert heard == []


def test_address_that_is_taken_is_reported(listen) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            listen(_echo, port=port)


# Lines to servers: by TCP first, then by the Unix socket that the server has told of.

NUMBER = bytes(7) + b"\1"


@pytest.fixture
def listener(keys) -> Iterator[Listener]:
    def handle(request: Request) -> None:
        request.answer(request.message)

    with Listener(keys, handle) as listener:
        yield listener


@pytest.fixture
def peer(listener) -> Peer:
    return Peer("Server 0", listener.addresses)


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


def test_unix_socket_is_used_from_the_first_request(connections, peer, listener) -> None:
    ask(connections)
    assert connections.to(0).place == peer.place == Place(listener.address, listener.local)
    assert connections.to(0).socket.last_endpoint == listener.local.encode()


@pytest.mark.parametrize("has_folder", [False, True])
def test_server_without_one_is_asked_by_tcp(keys, monkeypatch, has_folder) -> None:
    """Without a folder for it, and with one that takes no socket, as on a full disk."""
    if has_folder:
        monkeypatch.setattr(module, "local_address", lambda folder: "ipc:///none/such")
    else:
        monkeypatch.setattr(module, "make_local_folder", lambda: None)
    with Listener(keys, lambda request: request.answer(request.message)) as listener:
        assert listener.addresses == listener.address
        pool = ConnectionPool(keys, [Peer("Server 0", listener.addresses)])
        connections = ConnectionSet(pool)
        for _ in range(2):
            ask(connections)
            assert connections.to(0).place == Place(listener.address)
        connections.close()
        pool.end()


def test_unix_socket_of_another_machine_is_not_used(keys, listener) -> None:
    peer = Peer("Server 0", f"{listener.address} ipc:///of/another/machine")
    assert peer.place == Place(listener.address)


def test_socket_by_which_nothing_was_heard_is_left_for_good(connections, peer, listener) -> None:
    connections.to(0).leave_dead_socket()
    for _ in range(2):
        ask(connections)
        assert peer.place == Place(listener.address)


def test_busy_server_is_not_left_while_its_socket_is_there(connections, peer, listener) -> None:
    for _ in range(2):
        ask(connections)
    connections.to(0).leave_dead_socket()
    assert peer.place.local == listener.local
    Path(listener.local.removeprefix("ipc://")).unlink()
    connection = connections.to(0)
    connection.leave_dead_socket()
    assert connection.is_astray
    ask(connections)
    assert connections.to(0).place == Place(listener.address)


def test_socket_whose_handshake_is_late_takes_nothing_from_the_next(
    connections, peer, listener
) -> None:
    """On busy cores ZeroMQ is late to close the old one, which then is still let in."""
    late = CutLine(listener.address, is_held=True)
    peer.move(late.address)
    connection = connections.to(0)
    connection.ping(NUMBER, b"0")
    with connection.socket as old:
        peer.move(listener.address)
        connection.open()
        ask(connections)
        late.release()
        assert old.poll(30_000)  # it was let in, and is told what it has asked
        ask(connections)
    ask(connections)
    late.close()


def test_move_to_the_same_address_keeps_lines_and_takes_a_server_back(connections, peer) -> None:
    ask(connections)
    before = peer.place
    peer.abandon("it ended.")
    with pytest.raises(UnavailableError, match=r"Server 0 at tcp.* was lost: it ended\."):
        peer.require_present()
    peer.move(peer.addresses)
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


# Connections that no thread uses, and those of one thread.

_ABSENT = "tcp://127.0.0.1:1"


def test_pool_has_more_connections_than_zeromq_has_sockets_by_default() -> None:
    num_servers = zmq.Context.instance().max_sockets + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * num_servers
    if hard < needed:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    pool = ConnectionPool(ClusterKeys.make(), [Peer("Server", _ABSENT)] * num_servers)
    try:
        for server in range(num_servers):
            pool.give_back(server, pool.take(server))
    finally:
        pool.close()
        pool.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_released_connection_is_used_again_for_its_server() -> None:
    pool = ConnectionPool(
        ClusterKeys.make(), [Peer("Server 0", _ABSENT), Peer("Server 1", _ABSENT)]
    )
    first, second = ConnectionSet(pool), ConnectionSet(pool)
    to_0, to_1 = first.to(0), first.to(1)
    assert first.to(0) is to_0
    assert second.to(0) is not to_0
    first.release()
    assert second.to(1) is to_1
    assert first.to(0) is to_0
    for one in (first, second):
        one.close()
    pool.close()
    pool.end()


# Records with checksums.

FRAMES = [b"first", b"", b"third" * 50]


def written() -> bytes:
    file = io.BytesIO(b"head")
    file.seek(4)
    write_record(file, FRAMES)
    return file.getvalue()


def test_frames_come_back_from_the_middle_of_a_file() -> None:
    data = memoryview(written() + b"more")
    found = record_at(lambda begin, end: data[begin:end], 4, len(data))
    begin, end = found
    assert [*map(bytes, frames_in(data[begin:end]))] == FRAMES
    assert bytes(data[end:]) == b"more"
    offset = 4 + last_frame_offset([len(frame) for frame in FRAMES[:-1]])
    assert bytes(data[offset:end]) == FRAMES[-1]


def test_each_changed_byte_is_found() -> None:
    data = written()
    for place in range(4, len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        assert record_at(lambda a, b, one=changed: memoryview(one)[a:b], 4, len(data)) is None
    for length in range(4, len(data)):
        cut = memoryview(data)[:length]
        assert record_at(lambda a, b, one=cut: one[a:b], 4, length) is None
    with pytest.raises(ConnectionError, match="invalid frames"):
        frames_in(memoryview(b"\xff" * 4))

"""Requests to parameter servers and their answers, over real sockets on this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from stratagem.errors import UnavailableError
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.server_connections import Peer, ServerConnection
from stratagem.group.transport.wire import Message

Starts = Callable[..., Listener]


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.make()


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
    with Connections(keys, [listener.address] * num_servers) as connections:

        def ask(server: int) -> None:
            for _ in range(20):
                connections.ask(server, Message("x"), timeout_s=120.0)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(num_servers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(opened) == sorted(f"Parameter server {i}" for i in range(num_servers))


def test_threads_ask_at_the_same_time(listen, keys) -> None:
    listener = listen(_echo)
    got: dict[int, list[float]] = {}
    with Connections(keys, [listener.address]) as connections:

        def ask(thread: int) -> None:
            got[thread] = [
                float(
                    connections.ask(
                        0, Message("x", {}, [np.array([100.0 * thread + i])]), timeout_s=30.0
                    ).arrays[0][0]
                )
                for i in range(20)
            ]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert got == {t: [100.0 * t + i + 1 for i in range(20)] for t in range(4)}


def test_requests_of_different_connections_are_not_taken_for_each_other(listen, keys) -> None:
    both = threading.Barrier(2)

    def handle(request: Request) -> None:
        both.wait(120)
        _echo(request)

    listener = listen(handle)
    got: dict[int, Message] = {}

    def ask(client: int) -> None:
        with Connections(keys, [listener.address]) as connections:
            got[client] = connections.ask(0, Message("x", {"client": client}), timeout_s=120.0)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {client: answer.fields for client, answer in got.items()} == {
        client: {"client": client} for client in range(2)
    }


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
    got: dict[int, Message] = {}
    with Connections(keys, [listener.address]) as connections:

        def ask(thread: int) -> None:
            message = Message("wait", {"thread": thread})
            got[thread] = connections.ask(0, message, timeout_s=120.0)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {t: (one.kind, one.fields) for t, one in got.items()} == {
            t: ("done", {"thread": t}) for t in range(3)
        }


def test_error_of_a_server_is_raised_where_it_was_asked(listen, keys) -> None:
    def fail(request: Request) -> None:
        raise KeyError("no such variable")

    listener = listen(fail)
    with Connections(keys, [listener.address]) as connections:
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
    with Connections(keys, [listener.address]) as connections:
        connections.ask(0, Message("connects"))
        with pytest.raises(UnavailableError, match=r"gave no answer for 0\.2 s"):
            connections.ask(0, Message("x"), timeout_s=0.2)
        assert connections.ask(0, Message("x"), timeout_s=120.0).kind == "right"


def test_server_that_is_not_there_is_named(keys, monkeypatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.2")
    with (
        Connections(keys, [f"tcp://127.0.0.1:{port}"]) as connections,
        pytest.raises(UnavailableError, match=f"server 0 at .*:{port} gave no answer for 0.2 s"),
    ):
        connections.ask(0, Message("x"))


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
    mixed = ClusterKeys(
        keys.server_public, stranger.server_secret, stranger.client_public, stranger.client_secret
    )
    for strange in (stranger, mixed):
        with (
            Connections(strange, [listener.address]) as connections,
            pytest.raises(UnavailableError, match="with the keys of this cluster"),
        ):
            connections.ask(0, Message("x"), timeout_s=0.5)
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(listener.address)
        plain.send_multipart([b"12345678", b"{}"])
        assert not plain.poll(300)
    assert heard == []


def test_what_is_no_message_is_answered_with_an_error(listen, keys) -> None:
    listener = listen(_echo)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        keys.unlock(client)
        client.connect(listener.address)
        client.send_multipart([b"12345678", b"no JSON"])
        assert client.poll(30_000)
        assert b"invalid message" in b"".join(client.recv_multipart())


def test_address_that_is_taken_is_reported(listen) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}"):
            listen(_echo, port=port)


def test_listener_ends_twice_without_harm(listen) -> None:
    listener = listen(_echo)
    listener.close()
    listener.close()

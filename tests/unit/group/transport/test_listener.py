"""Requests at a listener: each is answered, and handled once while it is worked on."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import zmq

from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from tests.fresh_process import run_fresh
from tests.unit.group.transport.cut_connection import CutLine

_LIMIT_S = 120
_HEADER = b'{"kind":"x","fields":{},"arrays":[]}'


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.make()


@pytest.fixture
def client(keys) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        keys.unlock(client)
        yield client


def _leave(request: Request) -> None:
    raise SystemExit("left")


def _answer_what_is_no_json(request: Request) -> None:
    request.answer(Message("x", {"field": object()}))


@pytest.mark.parametrize(
    ("handle", "words"),
    [(_leave, "raised SystemExit: left"), (_answer_what_is_no_json, "raised TypeError: .*JSON")],
)
@pytest.mark.parametrize("at_once", [(), ("x",)])
def test_handler_that_fails_in_another_way_is_reported_too(keys, handle, words, at_once) -> None:
    with (
        Listener(keys, handle, num_threads=1, at_once=at_once) as listener,
        Connections(keys, [listener.address]) as connections,
    ):
        for _ in range(2):
            with pytest.raises(ServerError, match=words):
                connections.ask(0, Message("x"), timeout_s=_LIMIT_S)


def test_kinds_that_are_handled_at_once_do_not_wait_for_a_handler(keys) -> None:
    is_held, may_end = threading.Event(), threading.Event()

    def handle(request: Request) -> None:
        if request.message.kind == "hold":
            is_held.set()
            may_end.wait(_LIMIT_S)
        request.answer(Message(threading.current_thread().name))

    with (
        Listener(keys, handle, num_threads=1, at_once=("quick",)) as listener,
        Connections(keys, [listener.address]) as connections,
    ):
        held: list[Message] = []
        thread = threading.Thread(target=lambda: held.append(connections.ask(0, Message("hold"))))
        thread.start()
        assert is_held.wait(_LIMIT_S)
        assert connections.ask(0, Message("quick")).kind == "listener"
        may_end.set()
        thread.join()
    assert [message.kind for message in held] == ["handler 0"]


def test_short_requests_are_handled_at_once_while_no_handler_is_busy(keys) -> None:
    is_held, may_end = threading.Event(), threading.Event()

    def handle(request: Request) -> None:
        if request.message.kind == "long":
            is_held.set()
            may_end.wait(_LIMIT_S)
        request.answer(Message(threading.current_thread().name))

    def is_short(message: Message) -> bool:
        return message.kind == "short"

    with (
        Listener(keys, handle, num_threads=2, is_short=is_short) as listener,
        Connections(keys, [listener.address]) as connections,
    ):
        assert connections.ask(0, Message("short")).kind == "listener"
        thread = threading.Thread(target=lambda: connections.ask(0, Message("long")))
        thread.start()
        assert is_held.wait(_LIMIT_S)
        assert connections.ask(0, Message("short")).kind.startswith("handler")
        may_end.set()
        thread.join()


def test_request_that_comes_twice_is_handled_once_while_it_is_worked_on(keys, client) -> None:
    numbers: list[int] = []
    may_end = threading.Event()

    def handle(request: Request) -> None:
        numbers.append(request.message.fields["number"])
        may_end.wait(_LIMIT_S)
        request.answer(request.message)

    def send(number: int) -> None:
        header = b'{"kind":"x","fields":{"number":%d},"arrays":[]}' % number
        client.send_multipart([b"number %d" % number, header])

    def ping(number: int) -> list[bytes]:
        client.send_multipart([b"number %d" % number, b"ping", b"token"])
        assert client.poll(_LIMIT_S * 1000)
        return client.recv_multipart()

    with Listener(keys, handle) as listener:
        client.connect(listener.address)
        assert ping(1) == [b"number 1", b"unknown", b"token"]
        for number in (1, 1, 2, 1):
            send(number)
        for number in (1, 2, 1):
            assert ping(number) == [b"number %d" % number, b"known", b"token"]
        may_end.set()
        answers = []
        for _ in range(2):
            assert client.poll(_LIMIT_S * 1000)
            answers.append(client.recv_multipart()[0])
        assert sorted(answers) == [b"number 1", b"number 2"]
        assert ping(1) == [b"number 1", b"unknown", b"token"]
    assert sorted(numbers) == [1, 2]


@pytest.mark.parametrize("again", [[b"ping", b"token"], [_HEADER]])
def test_answer_goes_where_its_number_was_last_heard_from(keys, client, again) -> None:
    is_heard, may_end = threading.Event(), threading.Event()
    num_heard = 0

    def handle(request: Request) -> None:
        nonlocal num_heard
        num_heard += 1
        is_heard.set()
        may_end.wait(_LIMIT_S)
        request.answer(request.message)

    with Listener(keys, handle) as listener, zmq.Context() as context:
        with context.socket(zmq.DEALER) as before:
            before.linger = 0
            keys.unlock(before)
            before.connect(listener.address)
            before.send_multipart([b"number", _HEADER])
            assert is_heard.wait(_LIMIT_S)
        client.connect(listener.address)
        client.send_multipart([b"number", *again])
        client.send_multipart([b"other", b"ping", b"last"])
        received: list[bytes] = []
        while received[:1] != [b"other"]:
            assert client.poll(_LIMIT_S * 1000)
            received = client.recv_multipart()
        may_end.set()
        assert client.poll(_LIMIT_S * 1000)
        assert client.recv_multipart()[0] == b"number"
    assert num_heard == 1


@pytest.mark.parametrize("again", [[b"ping", b"token"], [_HEADER]])
@pytest.mark.parametrize("keep_s", [_LIMIT_S, 0.0])
def test_answer_whose_connection_is_gone_waits_for_who_asks_for_it(
    keys, client, again, keep_s, monkeypatch
) -> None:
    monkeypatch.setattr("stratagem.group.transport.listener._KEEP_S", keep_s)
    is_heard, may_end = threading.Event(), threading.Event()
    num_heard = 0

    def handle(request: Request) -> None:
        nonlocal num_heard
        num_heard += 1
        is_heard.set()
        may_end.wait(_LIMIT_S)
        request.answer(request.message)

    def receive() -> list[bytes]:
        assert client.poll(_LIMIT_S * 1000)
        return client.recv_multipart()

    with Listener(keys, handle, num_threads=1) as listener, zmq.Context() as context:
        line = CutLine(listener.address)
        with context.socket(zmq.DEALER) as before:
            before.linger = 0
            before.reconnect_ivl = -1
            keys.unlock(before)
            before.connect(line.address)
            before.send_multipart([b"number", _HEADER])
            assert is_heard.wait(_LIMIT_S)
            assert line.hang_up(_LIMIT_S)
        line.close()
        may_end.set()
        client.connect(listener.address)
        client.send_multipart([b"after", _HEADER])
        assert receive() == [b"after", _HEADER]
        client.send_multipart([b"number", *again])
        is_forgotten = again[0] == b"ping" and not keep_s
        assert receive() == [b"number", *([b"unknown", b"token"] if is_forgotten else [_HEADER])]
        client.send_multipart([b"number", b"ping", b"token"])
        assert receive() == [b"number", b"unknown", b"token"]
    assert num_heard == (3 if again == [_HEADER] and not keep_s else 2)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b""], [b"1", b"ping"], [b"1", b"known", b"2"]])
def test_frames_of_strangers_do_not_stop_it(keys, client, frames) -> None:
    def handle(request: Request) -> None:
        request.answer(request.message)

    with (
        Listener(keys, handle) as listener,
        Connections(keys, [listener.address]) as connections,
    ):
        client.connect(listener.address)
        client.send_multipart([b"number 0", *frames])
        client.send_multipart([b"", *frames] if frames else [b""])
        assert client.poll(_LIMIT_S * 1000)
        assert connections.ask(0, Message("x"), timeout_s=_LIMIT_S).kind == "x"


def test_last_answers_are_sent_when_it_is_closed(keys) -> None:
    listeners: list[Listener] = []
    closed = threading.Event()

    def handle(request: Request) -> None:
        request.answer(request.message)
        listeners[0].close()
        closed.set()

    for _ in range(10):
        closed.clear()
        listeners[:] = [Listener(keys, handle)]
        with Connections(keys, [listeners[0].address]) as connections:
            assert connections.ask(0, Message("end"), timeout_s=_LIMIT_S).kind == "end"
        assert closed.wait(_LIMIT_S)


_PAIR = """
import os, threading
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener
from stratagem.group.transport.wire import Message
keys, is_held = ClusterKeys.make(), threading.Event()
def handle(request):
    if request.message.kind == "hold":
        is_held.set()
        threading.Event().wait()
    request.answer(request.message)
listener = Listener(keys, handle)
connections = Connections(keys, [listener.address])
assert connections.ask(0, Message("x")).kind == "x"
hold = threading.Thread(target=connections.ask, args=(0, Message("hold")), daemon=True)
hold.start()
assert is_held.wait(120)
"""


def test_interpreter_ends_while_threads_wait_and_nothing_is_closed() -> None:
    assert run_fresh(_PAIR + "print('end')") == ["end"]


def test_interpreter_ends_where_a_handler_does_not() -> None:
    imported = "from stratagem.group.transport import listener as module\n"
    program = f"{imported}module._CLOSE_S = 0.1\n"
    end = "listener.close()\nconnections.close()\nprint('end')"
    assert run_fresh(program + _PAIR + end) == ["end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("ends", ["os._exit(0)", "sys.exit(0)"])
def test_forked_process_asks_by_sockets_of_its_own_and_leaves_those_of_its_parent(ends) -> None:
    program = f"""
import sys
child = os.fork()
if not child:
    for _ in range(3):
        assert connections.ask(0, Message("child"), timeout_s=120.0).kind == "child"
    connections.close()
    listener.close()
    {ends}
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert connections.ask(0, Message("parent"), timeout_s=120.0).kind == "parent"
print("end")
"""
    assert run_fresh(_PAIR + program) == ["end"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_requests_of_a_forked_process_and_of_its_parent_are_not_taken_for_each_other() -> None:
    program = """
import os, threading
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener
from stratagem.group.transport.wire import Message
keys, both = ClusterKeys.make(), threading.Barrier(2)
def handle(request):
    both.wait(120)
    request.answer(request.message)
listener = Listener(keys, handle)
connections = Connections(keys, [listener.address])
child = os.fork()
name = "parent" if child else "child"
assert connections.ask(0, Message("x", {"name": name}), timeout_s=120.0).fields == {"name": name}
if not child:
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("end")
"""
    assert run_fresh(program) == ["end"]

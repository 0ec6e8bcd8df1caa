"""Requests at a listener: each is answered, and handled once while it is worked on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from zmq.utils import z85

from stratagem.group.transport import listener as module
from stratagem.group.transport.connection import Connections, ServerError
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Admission, Listener, Request
from stratagem.group.transport.wire import Message
from tests.fresh_process import run_fresh
from tests.unit.group.transport.cut_connection import CutLine
from tests.unit.group.transport.strangers import (
    connect,
    flood,
    greeting,
    is_closed,
    long_frame,
    resident_bytes,
)

_LIMIT_S = 120
_HEADER = b'{"kind":"x","fields":{},"arrays":[]}'


@pytest.fixture
def client(keys) -> Iterator[zmq.Socket]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        keys.unlock(client)
        yield client


class Holding:
    """A handler that notes what it hears, and answers once it may."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.is_heard, self.may_end = threading.Event(), threading.Event()

    def __call__(self, request: Request) -> None:
        self.heard.append(request.message)
        self.is_heard.set()
        self.may_end.wait(_LIMIT_S)
        request.answer(request.message)


def _echo(request: Request) -> None:
    request.answer(request.message)


def _leave(request: Request) -> None:
    raise SystemExit("left")


def _answer_what_is_no_json(request: Request) -> None:
    request.answer(Message("x", {"field": object()}))


@pytest.mark.parametrize(
    ("handle", "words"),
    [(_leave, "raised SystemExit: left"), (_answer_what_is_no_json, "raised TypeError: .*JSON")],
)
@pytest.mark.parametrize("is_inline", [False, True])
def test_handler_that_fails_in_another_way_is_reported_too(keys, handle, words, is_inline) -> None:
    with (
        Listener(keys, handle, num_threads=1, is_inline=lambda *_: is_inline) as listener,
        Connections(keys, [listener.address]) as connections,
    ):
        for _ in range(2):
            with pytest.raises(ServerError, match=words):
                connections.ask(0, Message("x"), timeout_s=_LIMIT_S)


@pytest.mark.parametrize(
    ("kind", "idle", "busy"), [("quick", "listener", "listener"), ("short", "listener", "handler")]
)
def test_quick_kinds_are_handled_at_once_and_short_ones_if_idle(keys, kind, idle, busy) -> None:
    is_held, may_end = threading.Event(), threading.Event()

    def handle(request: Request) -> None:
        if request.message.kind == "hold":
            is_held.set()
            may_end.wait(_LIMIT_S)
        request.answer(Message(threading.current_thread().name))

    def is_inline(message: Message, is_idle: bool) -> bool:
        assert message.kind != "wrong"
        return message.kind == "quick" or (is_idle and message.kind == "short")

    with (
        Listener(keys, handle, num_threads=2, is_inline=is_inline) as listener,
        Connections(keys, [listener.address]) as connections,
    ):
        with pytest.raises(ServerError, match="AssertionError"):
            connections.ask(0, Message("wrong"), timeout_s=_LIMIT_S)
        assert connections.ask(0, Message(kind)).kind == idle
        held: list[Message] = []
        thread = threading.Thread(target=lambda: held.append(connections.ask(0, Message("hold"))))
        thread.start()
        assert is_held.wait(_LIMIT_S)
        assert connections.ask(0, Message(kind)).kind.startswith(busy)
        may_end.set()
        thread.join()
    assert held[0].kind.startswith("handler")


def test_request_that_comes_twice_is_handled_once_while_it_is_worked_on(keys, client) -> None:
    handle = Holding()

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
        handle.may_end.set()
        answers = []
        for _ in range(2):
            assert client.poll(_LIMIT_S * 1000)
            answers.append(client.recv_multipart()[0])
        assert sorted(answers) == [b"number 1", b"number 2"]
        assert ping(1) == [b"number 1", b"unknown", b"token"]
    assert sorted(message.fields["number"] for message in handle.heard) == [1, 2]


@pytest.mark.parametrize("again", [[b"ping", b"token"], [_HEADER]])
def test_answer_goes_where_its_number_was_last_heard_from(keys, client, again) -> None:
    handle = Holding()

    with Listener(keys, handle) as listener, zmq.Context() as context:
        with context.socket(zmq.DEALER) as before:
            before.linger = 0
            keys.unlock(before)
            before.connect(listener.address)
            before.send_multipart([b"number", _HEADER])
            assert handle.is_heard.wait(_LIMIT_S)
        client.connect(listener.address)
        client.send_multipart([b"number", *again])
        client.send_multipart([b"other", b"ping", b"last"])
        received: list[bytes] = []
        while received[:1] != [b"other"]:
            assert client.poll(_LIMIT_S * 1000)
            received = client.recv_multipart()
        handle.may_end.set()
        assert client.poll(_LIMIT_S * 1000)
        assert client.recv_multipart()[0] == b"number"
    assert len(handle.heard) == 1


@pytest.mark.parametrize("again", [[b"ping", b"token"], [_HEADER]])
@pytest.mark.parametrize("keep_s", [_LIMIT_S, 0.0])
def test_answer_without_a_connection_waits_for_who_asks(
    keys, client, again, keep_s, monkeypatch
) -> None:
    monkeypatch.setattr("stratagem.group.transport.listener._KEEP_S", keep_s)
    handle = Holding()

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
            assert handle.is_heard.wait(_LIMIT_S)
            assert line.hang_up(_LIMIT_S)
        line.close()
        handle.may_end.set()
        client.connect(listener.address)
        client.send_multipart([b"after", _HEADER])
        assert receive() == [b"after", _HEADER]
        client.send_multipart([b"number", *again])
        is_forgotten = again[0] == b"ping" and not keep_s
        assert receive() == [b"number", *([b"unknown", b"token"] if is_forgotten else [_HEADER])]
        client.send_multipart([b"number", b"ping", b"token"])
        assert receive() == [b"number", b"unknown", b"token"]
    assert len(handle.heard) == (3 if again == [_HEADER] and not keep_s else 2)


@pytest.mark.parametrize("frames", [[], [b""], [b"", b""], [b"1", b"ping"], [b"1", b"known", b"2"]])
def test_frames_of_strangers_do_not_stop_it(keys, client, frames) -> None:
    with Listener(keys, _echo) as listener, Connections(keys, [listener.address]) as connections:
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
from stratagem.group.transport.endpoints import ClusterKeys
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
from stratagem.group.transport.endpoints import ClusterKeys
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


# Peers without the keys of the cluster: they cost a server neither memory nor connections.

_FLOOD_BYTES = 2**27
# Of one frame that may be announced, and of buffers of the socket and of ZeroMQ.
_MOST_GROWTH_BYTES = 2**23
_PROGRAM = """
import sys
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.group.transport.endpoints import ClusterKeys
with ParameterServer(ClusterKeys(bytes.fromhex(sys.stdin.readline()))) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def server(keys) -> Iterator[tuple[int, str]]:
    """Process id and address of a server in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    process.stdin.write(f"{keys.secret.hex()}\n")
    process.stdin.flush()
    yield process.pid, process.stdout.readline().strip()
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("\n")
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def serves(keys: ClusterKeys, address: str) -> bool:
    with Connections(keys, [address]) as connections:
        answer = connections.ask(0, Message("describe"), timeout_s=60.0)
    return answer.kind == "ok"


@pytest.mark.parametrize(
    "begin",
    [
        greeting(b"CURVE") + long_frame(2**40),
        greeting(b"CURVE") + long_frame(_FLOOD_BYTES),
        greeting(b"CURVE") + long_frame(_FLOOD_BYTES, is_command=False),
        greeting(b"PLAIN") + long_frame(_FLOOD_BYTES),
        greeting(b"NULL") + long_frame(_FLOOD_BYTES),
        b"\xff" + (2**40).to_bytes(8, "big"),
        b"\x01\x00" * 1000,
        b"GET / HTTP/1.1\r\n",
        b"\xff" * 64,
    ],
    ids=["1TiB", "CURVE", "message", "PLAIN", "NULL", "ZMTP1", "old", "HTTP", "ones"],
)
def test_frame_before_the_handshake_takes_no_memory(keys, server, begin) -> None:
    pid, address = server
    assert serves(keys, address)
    before_bytes = resident_bytes(pid)
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            stranger = stack.enter_context(connect(address))
            stranger.settimeout(1.0)  # a stranger that the server stopped to read
            with contextlib.suppress(OSError):
                stranger.sendall(begin)
            flood(stranger, _FLOOD_BYTES // 2)
        assert resident_bytes(pid) - before_bytes < _MOST_GROWTH_BYTES
    assert serves(keys, address)


def test_handshake_without_an_end_is_closed_and_clients_are_served(keys, monkeypatch) -> None:
    monkeypatch.setattr(module, "_HANDSHAKE_MS", 500)

    with (
        Listener(keys, _echo) as listener,
        Connections(keys, [listener.address]) as connections,
        contextlib.ExitStack() as stack,
    ):
        strangers = [stack.enter_context(connect(listener.address)) for _ in range(50)]
        for place, stranger in enumerate(strangers):
            stranger.sendall(greeting(b"CURVE")[: place + 14])
        array = np.arange(2**20)  # in more than one frame
        answer = connections.ask(0, Message("x", {}, [array]), timeout_s=60.0)
        np.testing.assert_array_equal(answer.arrays[0], array)
        assert all(is_closed(stranger, 120.0) for stranger in strangers)
        assert connections.ask(0, Message("y"), timeout_s=60.0).kind == "y"


# Who is let in, asked as ZeroMQ asks (RFC 27).

KEYS = ClusterKeys.make()
KEY = z85.decode(KEYS.client_public)
OTHER = z85.decode(ClusterKeys.make().client_public)


@pytest.mark.parametrize(
    ("mechanism", "credentials", "status"),
    [
        (b"CURVE", [KEY], b"200"),
        (b"CURVE", [OTHER], b"400"),
        (b"CURVE", [KEY[:-1]], b"400"),
        (b"CURVE", [], b"400"),
        (b"PLAIN", [b"client", KEY], b"400"),
        (b"NULL", [], b"400"),
        (b"GSSAPI", [b"client"], b"400"),
    ],
)
def test_only_clients_of_the_cluster_are_let_in(mechanism, credentials, status) -> None:
    with zmq.Context() as context:
        admission = Admission(context, KEYS.client_public)
        with context.socket(zmq.REQ) as asking:
            asking.linger = 0
            asking.connect("inproc://zeromq.zap.01")
            about = [b"domain", b"127.0.0.1", b"identity"]
            asking.send_multipart([b"1.0", b"7", *about, mechanism, *credentials])
            admission.answer()
            answer = asking.recv_multipart()
        assert answer[:3] == [b"1.0", b"7", status]
        assert len(answer) == 6
        admission.socket.close()


def test_keys_are_new_each_time_and_not_shown() -> None:
    one, other = ClusterKeys.make(), ClusterKeys.make()
    assert one.secret != other.secret
    assert one.client_public != other.client_public
    for shown in (repr(one), str(one), f"{one}"):
        assert str(one.secret) not in shown
        assert one.secret.hex() not in shown

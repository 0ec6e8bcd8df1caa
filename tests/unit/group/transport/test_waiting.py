"""Answers of servers that are slow, lost, started again or elsewhere, and lost messages."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from stratagem.errors import UnavailableError
from stratagem.group.transport import connection as connection_module
from stratagem.group.transport import connection as waiting
from stratagem.group.transport import endpoints
from stratagem.group.transport import listener as listening
from stratagem.group.transport.connection import Connections, ConnectionSet, ServerConnection
from stratagem.group.transport.endpoints import ClusterKeys, is_reachable
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from tests.unit.group.transport.cut_connection import CutLine

_LIMIT_S = 120


class Recording:
    """A listener whose handler notes what it hears, and answers when it is let.

    Args:
        keys: of the cluster.
        name: that it answers with.
        answers: whether it answers at once.
        port: where it listens.
    """

    def __init__(self, keys: ClusterKeys, name: str, *, answers: bool = True, port: int = 0):
        self.heard: list[Message] = []
        self.has_heard = threading.Event()
        self.may_answer = threading.Event()
        self._name = name
        if answers:
            self.may_answer.set()
        self.listener = Listener(keys, self._handle, port=port)
        self.address = self.listener.address
        self.addresses = self.listener.addresses

    def _handle(self, request: Request) -> None:
        self.heard.append(request.message)
        self.has_heard.set()
        if self.may_answer.wait(_LIMIT_S):
            request.answer(Message(self._name, request.message.fields))

    def close(self) -> None:
        """Ends as a process that is killed does: nothing more is answered."""
        self.listener.close()


Starts = Callable[..., Recording]


@pytest.fixture
def start(keys, monkeypatch) -> Iterator[Starts]:
    monkeypatch.setattr("stratagem.group.transport.listener._CLOSE_S", 0.01)
    started: list[Recording] = []

    def start(name: str, **options) -> Recording:
        started.append(Recording(keys, name, **options))
        return started[-1]

    yield start
    for one in started:
        one.may_answer.set()
        one.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.fixture
def only_tcp(monkeypatch) -> None:
    monkeypatch.setattr(listening, "make_local_folder", lambda: None)


@pytest.fixture
def impatient(monkeypatch) -> None:
    """The limit that a server is given up after, and by it how often it is asked."""
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.4")


class Pings:
    """Counts how often servers are asked whether they work on something."""

    def __init__(self, monkeypatch) -> None:
        self._count = 0
        self._changed = threading.Condition()
        ping = ServerConnection.ping

        def count(connection: ServerConnection, *arguments: bytes) -> None:
            ping(connection, *arguments)
            with self._changed:
                self._count += 1
                self._changed.notify_all()

        monkeypatch.setattr(ServerConnection, "ping", count)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, _LIMIT_S)


@pytest.fixture
def pings(monkeypatch) -> Pings:
    return Pings(monkeypatch)


def asked(pool: ThreadPoolExecutor, connections: Connections, server: int = 0) -> Future[str]:
    return pool.submit(lambda: connections.ask(server, Message("x", {"number": 7})).kind)


def test_server_that_works_is_waited_for_for_longer(start, keys, pool, monkeypatch, pings) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "1.0")
    monkeypatch.setattr(waiting, "_SILENCE_S", 0.05)
    server = start("done", answers=False)
    with Connections(keys, [server.addresses]) as connections:
        for _ in range(2):  # by TCP, then by the Unix socket
            server.may_answer.clear()
            answer = asked(pool, connections)
            pings.wait_for(30)  # of which 20 fill the limit
            assert not answer.done()
            server.may_answer.set()
            assert answer.result(_LIMIT_S) == "done"
    assert len(server.heard) == 2


@pytest.mark.parametrize("num_before", [0, 1])
def test_server_that_restarts_is_sent_it_again(start, keys, pool, monkeypatch, num_before) -> None:
    """Before its second request, a client has heard of its Unix socket; the next has another."""
    monkeypatch.setattr(waiting, "_SILENCE_S", 0.5)
    first = start("first")
    with Connections(keys, [first.addresses]) as connections:
        for _ in range(num_before):
            connections.ask(0, Message("x"))
        first.may_answer.clear()
        first.has_heard.clear()
        answer = asked(pool, connections)
        assert first.has_heard.wait(_LIMIT_S)
        first.close()
        second = start("second", port=int(first.address.rpartition(":")[2]))
        assert answer.result(_LIMIT_S) == "second"
        assert connections.ask(0, Message("x")).kind == "second"
    assert [message.fields for message in second.heard] == [{"number": 7}, {}]


@pytest.mark.parametrize(("way", "num_heard"), [("there", 1), ("back", 2)])
def test_lost_message_is_sent_again(
    start, keys, pool, monkeypatch, only_tcp, way, num_heard
) -> None:
    monkeypatch.setattr(waiting, "_SILENCE_S", 0.5)
    server = start("done")
    connection = CutLine(server.address)
    with Connections(keys, [connection.address]) as connections:
        assert connections.ask(0, Message("first")).kind == "done"
        connection.lose(way)
        answer = asked(pool, connections)
        assert connection.has_lost.wait(_LIMIT_S)
        connection.cut()
        assert answer.result(_LIMIT_S) == "done"
    connection.close()
    assert [message.kind for message in server.heard] == ["first"] + ["x"] * num_heard


def test_answer_over_a_broken_connection_comes_by_the_next(
    start, keys, pool, monkeypatch, only_tcp, pings
) -> None:
    monkeypatch.setattr(waiting, "_SILENCE_S", 0.5)
    server = start("done", answers=False)
    connection = CutLine(server.address)
    with Connections(keys, [connection.address]) as connections:
        answer = asked(pool, connections)
        assert server.has_heard.wait(_LIMIT_S)
        connection.cut()
        pings.wait_for(5)
        server.may_answer.set()
        assert answer.result(_LIMIT_S) == "done"
    connection.close()
    assert len(server.heard) == 1


def test_lost_server_is_noticed_while_another_works(start, keys, impatient) -> None:
    slow, lost = start("slow", answers=False), start("lost")
    lost.close()
    for addresses in ([slow.address, lost.address], [lost.address, slow.address]):
        index = addresses.index(lost.address)
        with (
            Connections(keys, addresses, peers="Worker") as connections,
            pytest.raises(UnavailableError, match=f"Worker {index} at {lost.address} gave no"),
        ):
            connections.ask_all({0: Message("x"), 1: Message("x")})


@pytest.mark.parametrize("num_before", [0, 1])
def test_all_threads_follow_a_server_that_moves(start, keys, pool, num_before) -> None:
    first, second = start("first"), start("second")
    with Connections(keys, [first.addresses, first.addresses]) as connections:
        for _ in range(num_before):
            connections.ask(0, Message("x"))
        first.may_answer.clear()
        first.heard.clear()
        answers = [asked(pool, connections) for _ in range(2)]
        assert first.has_heard.wait(_LIMIT_S)
        connections.move(0, second.address)
        assert [answer.result(_LIMIT_S) for answer in answers] == ["second", "second"]
        assert connections.ask(0, Message("x")).kind == "second"
        first.may_answer.set()
        assert connections.ask(1, Message("x")).kind == "first"


def test_what_is_no_address_harms_only_who_asks_there(start, keys) -> None:
    first = start("first")
    with Connections(keys, [first.address, "no address"]) as connections:
        connections.ask(0, Message("x"))
        for server, address in [(1, "no address"), (0, "none either")]:
            connections.move(server, address)
            for _ in range(2):
                with pytest.raises(zmq.ZMQError, match="Invalid argument"):
                    connections.ask(server, Message("x"))
        connections.move(0, first.address)
        assert connections.ask(0, Message("x")).kind == "first"


def test_silent_server_is_looked_for_and_not_too_often(start, keys, monkeypatch, impatient) -> None:
    first, second = start("first"), start("second")
    known: list[str | None] = [None]
    asked_for: list[int] = []

    def locate(server: int) -> str | None:
        asked_for.append(server)
        return known[0]

    with Connections(keys, ["tcp://127.0.0.1:1", first.address], locate=locate) as connections:
        assert connections.ask(1, Message("x")).kind == "first"
        assert asked_for == []
        with pytest.raises(UnavailableError, match=r"server 0 at tcp://127\.0\.0\.1:1 gave"):
            connections.ask(0, Message("x"))
        assert asked_for == [0]  # it is silent, several times
        monkeypatch.setattr(connection_module, "_LOCATE_EVERY_S", 0.0)
        known[0] = second.address
        assert connections.ask(0, Message("x")).kind == "second"


@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("its process ended with status 9.", "^Worker 0 at .* was lost: its process ended"),
        (RuntimeError("ps 0 has no restarts left."), r"^ps 0 has no restarts left\.$"),
    ],
)
def test_lost_server_is_not_waited_for_until_it_moves(start, keys, pool, why, words) -> None:
    lost, other, third = start("lost", answers=False), start("other", answers=False), start("third")
    with Connections(keys, [lost.address, other.address], peers="Worker") as connections:
        answers = [asked(pool, connections) for _ in range(2)]
        unharmed = asked(pool, connections, 1)
        assert lost.has_heard.wait(_LIMIT_S)
        connections.abandon(0, why)
        for answer in answers:
            with pytest.raises(UnavailableError, match=words):
                answer.result(_LIMIT_S)
        for messages in ({1: Message("x"), 0: Message("x")}, {0: Message("x")}):
            with pytest.raises(UnavailableError, match=words):
                connections.ask_all(messages)
        other.may_answer.set()
        assert unharmed.result(_LIMIT_S) == "other"
        connections.move(0, third.address)
        assert connections.ask(0, Message("x")).kind == "third"
        assert connections.ask(1, Message("x")).kind == "other"


def test_thread_that_waits_for_a_lost_server_is_woken(start, keys, pool, monkeypatch) -> None:
    """It would wait an hour before it asks the server whether it works on something."""
    waits = threading.Event()
    poll = zmq.zmq_poll

    def noted(*arguments: object) -> object:
        waits.set()
        return poll(*arguments)

    monkeypatch.setattr(zmq, "zmq_poll", noted)
    monkeypatch.setattr(waiting, "_SILENCE_S", 3600.0)
    server = start("server", answers=False)
    with Connections(keys, [server.addresses], silence_s=4 * 3600.0) as connections:
        answer = asked(pool, connections)
        assert waits.wait(_LIMIT_S)
        connections.abandon(0, "its process ended with status 9.")
        with pytest.raises(UnavailableError, match="was lost: its process ended"):
            answer.result(_LIMIT_S)


def test_messages_that_were_given_up_are_sent_by_no_later_connection(
    start, keys, impatient
) -> None:
    server = start("done")
    port = int(server.address.rpartition(":")[2])
    server.close()
    with Connections(keys, [server.addresses]) as connections:
        with pytest.raises(UnavailableError, match="gave no answer"):
            connections.ask(0, Message("given up"))
        again = start("again", port=port)
        assert connections.ask(0, Message("x"), timeout_s=_LIMIT_S).kind == "again"
    assert [message.kind for message in again.heard] == ["x"]


def test_thread_that_was_woken_waits_on_without_turning(start, keys, pool, monkeypatch) -> None:
    """What woke it is taken: else it would be woken for ever."""
    taken = threading.Event()
    note_woken = ConnectionSet.note_woken

    def note(connections: ConnectionSet) -> None:
        note_woken(connections)
        taken.set()

    monkeypatch.setattr(ConnectionSet, "note_woken", note)
    server = start("server", answers=False)
    with Connections(keys, [server.addresses]) as connections:
        asked = pool.submit(connections.ask, 0, Message("a"))
        assert server.has_heard.wait(_LIMIT_S)
        connections.move(0, server.addresses)
        assert taken.wait(_LIMIT_S)
        server.may_answer.set()
        assert asked.result(_LIMIT_S).kind == "server"


@pytest.mark.parametrize("num_before", [0, 1])
def test_closing_connections_ends_what_waits(start, keys, pool, num_before) -> None:
    server = start("done")
    connections = Connections(keys, [server.addresses])
    for _ in range(num_before):
        connections.ask(0, Message("x"))
    server.may_answer.clear()
    server.has_heard.clear()
    answer = asked(pool, connections)
    assert server.has_heard.wait(_LIMIT_S)
    connections.close()
    connections.close()
    with pytest.raises(UnavailableError, match="connections to the servers were closed before"):
        answer.result(_LIMIT_S)
    with pytest.raises(UnavailableError, match="connections to the servers were closed before"):
        connections.ask(0, Message("x"))


def test_closing_a_listener_ends_what_waits_for_it(start, keys, pool, impatient) -> None:
    server = start("done", answers=False)
    with Connections(keys, [server.addresses]) as connections:
        answer = asked(pool, connections)
        assert server.has_heard.wait(_LIMIT_S)
        server.close()
        with pytest.raises(UnavailableError, match=r"gave no answer for 0\.4 s"):
            answer.result(_LIMIT_S)


_SERVER = """
import sys
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Listener
from stratagem.group.transport.wire import Message
def handle(request):
    if request.message.kind == sys.argv[3]:
        print("held", flush=True)
    else:
        request.answer(Message(sys.argv[3]))
listener = Listener(ClusterKeys(bytes.fromhex(sys.argv[1])), handle, port=int(sys.argv[2]))
print(listener.addresses, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def process(keys: ClusterKeys, port: int, name: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _SERVER, keys.secret.hex(), str(port), name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def test_process_that_is_killed_leaves_nothing_that_holds_clients(keys, pool, monkeypatch) -> None:
    """As of the Unix socket, whose file stays."""
    monkeypatch.setattr(waiting, "_SILENCE_S", 0.5)
    with process(keys, 0, "first") as first:
        addresses = first.stdout.readline().strip()
        address, _, local = addresses.partition(" ")
        with Connections(keys, [addresses]) as connections:
            assert connections.ask(0, Message("x")).kind == "first"
            answer = pool.submit(connections.ask, 0, Message("first"))
            assert first.stdout.readline() == "held\n"
            first.kill()
            first.wait()
            assert Path(local.removeprefix("ipc://")).exists()
            with process(keys, int(address.rpartition(":")[2]), "second") as second:
                assert second.stdout.readline().startswith(address)
                assert answer.result(_LIMIT_S).kind == "second"
                assert connections.ask(0, Message("x")).kind == "second"
                second.stdin.close()
                assert second.wait(_LIMIT_S) == 0
    assert not Path(local.removeprefix("ipc://")).exists()  # the second one has removed it


# Unix sockets of servers: only where nobody else can come between, and only while one listens.


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """A folder of a short path, which pytest's own is not always."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(endpoints, "_MAX_PATH_BYTES", 200)
    return tmp_path


def test_path_that_is_too_long_is_not_used(base, monkeypatch) -> None:
    with endpoints.make_local_folder() as folder:
        length = len(str(folder.path / "socket"))
    monkeypatch.setattr(endpoints, "_MAX_PATH_BYTES", length)
    with endpoints.make_local_folder() as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    monkeypatch.setattr(endpoints, "_MAX_PATH_BYTES", length - 1)
    assert endpoints.make_local_folder() is None
    assert list(base.iterdir()) == []


def test_only_one_at_which_somebody_listens_is_reachable(base, monkeypatch) -> None:
    with endpoints.make_local_folder() as folder:
        address, path = endpoints.local_address(folder), folder.path / "socket"
        assert not is_reachable(address)
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            assert not is_reachable(address)
            listening.listen()
            assert is_reachable(address)
            folder.path.chmod(0o755)
            assert not is_reachable(address)
            folder.path.chmod(0o700)
            with monkeypatch.context() as patch:
                patch.setattr("os.geteuid", lambda: os.getuid() + 1)
                assert not is_reachable(address)
        assert path.exists()
        assert not is_reachable(address)  # what a process that was killed leaves
        path.unlink()
        path.write_text("")
        assert not is_reachable(address)
        assert not is_reachable("")


def test_listener_has_one_while_it_is_open_without_keys(base) -> None:
    def handle(request) -> None:
        request.answer(request.message)

    with Listener(ClusterKeys.make(), handle) as listener, zmq.Context() as context:
        assert is_reachable(listener.local)
        for address, is_heard in [(listener.local, True), (listener.address, False)]:
            with context.socket(zmq.DEALER) as client:
                client.linger = 0
                client.connect(address)
                client.send_multipart([b"12345678", b"no message"])
                assert bool(client.poll(30_000 if is_heard else 300)) == is_heard
                assert not is_heard or b"invalid message" in b"".join(client.recv_multipart())
    assert list(base.iterdir()) == []

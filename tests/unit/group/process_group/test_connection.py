"""Port of a group: strangers, other programs on it, and members without the secret."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import http.server
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.group.authentication import secret as gate
from stratagem.group.authentication.secret import Credentials, Secret
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.unit.group.authentication import peers
from tests.unit.group.authentication.certificates import make_certificates
from tests.unit.group.process_group.members import (
    as_bytes,
    connected,
    end_joining,
    free_port,
    hello,
    identity,
    joined,
    together,
)
from tests.unit.launch.waiting import until

# So long that a test which waited for it would be noticed.
_LIMITS = GroupLimits(join_s=600, peer_s=600, stuck_s=600, barrier_s=600)


@pytest.fixture
def two(monkeypatch) -> Iterator[list[Group]]:
    """A group whose port gives a new connection half a second to say hello."""
    monkeypatch.setenv("STRATAGEM_HANDSHAKE_TIMEOUT_S", "600")
    groups = joined(2, _LIMITS)
    groups[0]._connection._hub._hello_s = 0.5
    yield groups
    for group in groups:
        group.abandon()


def shorten_handshakes(group: Group) -> None:
    gate = group._connection._gate
    gate._limits = dataclasses.replace(gate._limits, timeout_s=0.5)


def continues(groups: list[Group]) -> bool:
    return together(2, lambda i: groups[i].exchange("position", i)) == [[0, 1]] * 2


def rest_of(connection: socket.socket) -> bytes:
    """Returns what still comes before the other side closes."""
    connection.settimeout(120)
    with contextlib.suppress(ConnectionError):
        return peers.received(connection, 2**20)
    return b""


def test_huge_frame_of_a_stranger_is_not_read(two) -> None:
    """Only what fits into the buffers of the system leaves the sender."""
    size = 200 * 2**20
    data = memoryview(size.to_bytes(4, "big") + b'["' + b"a" * size)
    shorten_handshakes(two[0])
    with peers.dialed(two[0].identity.port) as connection, pytest.raises(ConnectionError):
        connection.sendall(data)
    assert continues(two)


@pytest.mark.parametrize("message", [hello(1, 3), hello(2, 3), {"kind": "tunnel"}])
def test_stranger_is_no_member_and_reaches_no_service(message) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", 0)) as service, contextlib.ExitStack() as stack:
        first = threading.Thread(
            target=lambda: stack.callback(Group(identity(0, 2, port), _LIMITS).abandon)
        )
        first.start()
        with peers.dialed(port) as stranger:
            stranger.sendall(as_bytes(message))
            assert rest_of(stranger) == b""
            second = Group(identity(1, 2, port), _LIMITS)
            first.join()
            stack.callback(second.abandon)
            assert second.identity.process_id == 1
        service.settimeout(0)
        with pytest.raises(BlockingIOError):
            service.accept()


def _leads_to(one: object, ends: set[Any]) -> bool:
    """True for an open socket whose other side is one of these."""
    with contextlib.suppress(OSError):
        return isinstance(one, socket.socket) and one.fileno() != -1 and one.getpeername() in ends
    return False


def test_idle_connections_are_closed_and_free_their_descriptors(two) -> None:
    shorten_handshakes(two[0])
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(peers.dialed(two[0].identity.port)) for _ in range(100)]
        assert continues(two)
        for connection in idle:
            assert rest_of(connection) == b""
        until(lambda: two[0]._connection._gate.num_handshakes == 0)
        ends = {connection.getsockname() for connection in idle}
        gc.collect()
        assert not [one for one in gc.get_objects() if _leads_to(one, ends)]
    assert continues(two)


@pytest.mark.parametrize("role", ["member 1", "other 1", ""])
def test_connection_that_says_no_hello_is_closed(two, role) -> None:
    with connected(two[0].identity.port, claim=role) as connection:
        assert rest_of(connection) == b""
    assert continues(two)


def test_hello_of_another_rank_than_was_proved_is_refused(two) -> None:
    with connected(two[0].identity.port, hello(1, 2), claim="member 0") as connection:
        assert rest_of(connection) == b""
    assert continues(two)


def test_hello_has_a_limit(two) -> None:
    message = hello(1, 2, host="h" * 2**20)
    with connected(two[0].identity.port, claim="member 1") as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(as_bytes(message))
        assert rest_of(connection) == b""
    assert continues(two)


def test_number_of_admitted_connections_is_limited(two) -> None:
    port = two[0].identity.port
    with contextlib.ExitStack() as stack:
        two[0]._connection._hub._hello_s = 600
        opened = [stack.enter_context(connected(port, claim="tunnel 1")) for _ in range(30)]
        # 16 for two members, two of which they have
        until(lambda: sum(map(_is_closed, opened)) >= 14)
        assert continues(two)


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except BlockingIOError:
        return False


def test_cluster_on_loopback_listens_nowhere_else(two) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", two[0].identity.port), 120)


@pytest.mark.slow
def test_worker_with_another_secret_hears_it_at_once() -> None:
    port, limits = free_port(), dataclasses.replace(_LIMITS)
    have_heard = threading.Barrier(2, lambda: end_joining(limits))
    secrets = [Credentials(Secret("a" * 32)), Credentials(Secret("b" * 32)), Credentials()]

    def join(index: int) -> Group:
        try:
            own = limits if index == 0 else _LIMITS
            return Group(identity(index, 3, port), own, secrets[index])
        finally:
            if index:
                have_heard.wait(120)

    first, *others = together(3, join)
    assert "worker 1 (host1:1), worker 2 (host2:1) did not" in str(first)
    for error in others:
        assert isinstance(error, ValueError)
        assert "worker 0 (host0:1) and this process do not have the same secret" in str(error)


def test_members_with_the_secret_and_certificates_train(monkeypatch, tmp_path) -> None:
    for name, text in make_certificates(tmp_path).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    credentials = Credentials.find("worker 0", ["127.0.0.1"])
    port = free_port()
    groups = together(2, lambda i: Group(identity(i, 2, port), _LIMITS, credentials))
    try:
        assert continues(groups)
    finally:
        for group in groups:
            group.abandon()


@pytest.mark.slow
def test_certificate_that_process_0_does_not_accept_is_named(monkeypatch, tmp_path) -> None:
    """TLS 1.3 refuses it after the client has ended its part."""
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    found: list[Credentials] = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        for name, text in make_certificates(folder).items():
            monkeypatch.setenv(name, text)
        (folder / "ca.crt").write_bytes((tmp_path / "a" / "ca.crt").read_bytes())
        found.append(Credentials.find("worker", ["127.0.0.1"]))
    port, limits = free_port(), dataclasses.replace(_LIMITS)

    def join(index: int) -> Group:
        try:
            return Group(identity(index, 2, port), limits if index == 0 else _LIMITS, found[index])
        finally:
            if index:
                end_joining(limits)

    _, error = together(2, join)
    assert isinstance(error, ValueError)
    assert "TLS with worker 0 (host0:1) failed" in str(error)


class _Page(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words: Any) -> None:
        pass


def test_port_that_a_web_server_has_taken_ends_all_workers_at_once() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), _Page) as taken:
        serving = threading.Thread(target=taken.serve_forever, args=(0.05,))
        serving.start()
        port = taken.server_port
        errors = together(3, lambda i: Group(identity(i, 3, port), _LIMITS))
        taken.shutdown()
        serving.join()
    assert [type(error) for error in errors] == [ValueError] * 3
    assert f"worker 0 (host0:1) cannot listen on port {port}" in str(errors[0])
    for error in errors[1:]:
        assert f"Another program has taken port {port} of worker 0 (host0:1)" in str(error)


def test_port_that_a_silent_program_has_taken_is_named_after_the_limit(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_HANDSHAKE_TIMEOUT_S", "0.1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        limits = GroupLimits(join_s=600, peer_s=0.5)
        with pytest.raises(
            ValueError,
            match=rf"Port {port} of worker 0 \(host0:1\) accepts connections, but does not answer "
            r"worker 1 \(host1:1\)(?s:.)*STRATAGEM_PEER_TIMEOUT_S",
        ):
            Group(identity(1, 2, port), limits)


def test_coordination_port_leads_through_the_tunnel(two) -> None:
    service_port = two[0].open_coordination_port()
    door = two[1].open_coordination_port()
    assert door not in (service_port, two[0].identity.port)
    with (
        socket.create_server(("127.0.0.1", service_port)) as service,
        socket.create_connection(("127.0.0.1", door), 120) as client,
    ):
        client.sendall(b"ping")
        inner, _ = service.accept()
        with inner:
            assert peers.received(inner, 4) == b"ping"
            inner.sendall(b"pong")
            assert peers.received(client, 4) == b"pong"


def test_door_closes_a_connection_that_leads_nowhere(two) -> None:
    door = two[1].open_coordination_port()
    two[0].abandon()
    with socket.create_connection(("127.0.0.1", door), 120) as client:
        assert rest_of(client) == b""


def test_loop_of_the_group_does_no_handshake(two, monkeypatch) -> None:
    """Training waits for that thread."""
    threads: set[str] = set()
    admit = gate.admit

    async def recorded(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name)
        return await admit(*arguments)

    monkeypatch.setattr(gate, "admit", recorded)
    with connected(two[0].identity.port, claim="member 1"):
        until(lambda: threads)
    assert threads == {"stratagem-gate"}

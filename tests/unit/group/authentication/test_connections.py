"""Authenticated connections: streams of both sides, plain and encrypted."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from stratagem.group.authentication import connections as module
from stratagem.group.authentication.connections import (
    UnansweredError,
    connect,
    listening_sockets,
    local_addresses,
    open_streams,
)
from stratagem.group.authentication.secret import Credentials, Gate, Secret, required_secret
from tests.unit.group.authentication.certificates import make_certificates

_SECRET = Secret("s" * 32)


@contextlib.asynccontextmanager
async def echo(credentials: Credentials) -> AsyncIterator[int]:
    """A server that sends back what it gets; yields its port."""
    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []

    async def serve(connection: socket.socket) -> None:
        writer = None
        with contextlib.suppress(OSError):
            reader, writer = await open_streams(connection, credentials, is_server=True)
            while data := await reader.read(2**16):
                writer.write(data)
        (writer or connection).close()

    def start(connection: socket.socket) -> None:
        tasks.append(loop.create_task(serve(connection)))

    def admit(connection: socket.socket, claim: str) -> None:
        assert claim == "member 1"
        loop.call_soon_threadsafe(start, connection)

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    with Gate([listener], credentials, admit, purpose="test"):
        yield port
    await asyncio.gather(*tasks)


async def reach(port: int, credentials: Credentials, limit_s: float = 20) -> Any:
    return await connect(
        "127.0.0.1",
        port,
        credentials,
        "member 1",
        purpose="test",
        server="worker 0 (a:1)",
        limit_s=limit_s,
    )


async def exchanged(server: Credentials, client: Credentials) -> bytes:
    async with echo(server) as port:
        reader, writer = await reach(port, client)
        try:
            writer.write(b"x" * 10**6)
            return await asyncio.wait_for(reader.readexactly(10**6), 120)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@pytest.fixture(scope="module")
def known(tmp_path_factory) -> dict[str, Credentials]:
    """Credentials of one secret: plain, and with the certificates of two authorities."""
    found = {"plain": Credentials(_SECRET), "no secret": Credentials()}
    for name in ("tls", "other tls"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("STRATAGEM_SECRET", "s" * 32)
            for variable, text in make_certificates(tmp_path_factory.mktemp("tls")).items():
                patch.setenv(variable, text)
            found[name] = Credentials.find("worker 0", ["127.0.0.1"])
    return found


@pytest.mark.parametrize("name", ["plain", "tls"])
def test_connection_carries_data(known, name) -> None:
    assert asyncio.run(exchanged(known[name], known[name])) == b"x" * 10**6


@pytest.mark.parametrize(
    ("server", "client", "words"),
    [
        ("tls", "other tls", r"TLS with worker 0 \(a:1\) failed(?s:.)*one authority"),
        ("tls", "plain", r"Only worker 0 \(a:1\) uses TLS"),
        ("plain", "tls", "Only this process uses TLS"),
        ("plain", "no secret", "do not have the same secret"),
    ],
)
def test_other_credentials_are_named(known, server, client, words) -> None:
    with pytest.raises(ValueError, match=words):
        asyncio.run(exchanged(known[server], known[client]))


def test_socket_that_connects_to_itself_is_closed(monkeypatch) -> None:
    """TCP does that if the system chooses the port for the client, and nothing listens there."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    class Bound(socket.socket):
        def __init__(self, *arguments: int) -> None:
            super().__init__(*arguments)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(("127.0.0.1", port))

    async def dial() -> None:
        monkeypatch.setattr(socket, "socket", Bound)
        try:
            await reach(port, Credentials())
        finally:
            monkeypatch.undo()

    with pytest.raises(ConnectionRefusedError, match="refused"):
        asyncio.run(dial())
    socket.create_server(("127.0.0.1", port)).close()


def test_silent_program_is_given_up_after_the_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UnansweredError, match=r"no answer within 0.2 s"):
            asyncio.run(reach(port, Credentials(), limit_s=0.2))


# Addresses at which a task listens: those of its name, and no others.

_HOSTS = {"here": ["127.0.1.1"], "there": ["192.0.2.7"], "service": ["192.0.2.9"], "gone": []}


@pytest.fixture
def names(monkeypatch) -> None:
    """Names as Debian's /etc/hosts and a cluster's DNS have them."""
    resolved = module._resolved
    monkeypatch.setattr(
        module, "_resolved", lambda host: _HOSTS[host] if host in _HOSTS else resolved(host)
    )


def bound(host: str, hosts: tuple[str, ...] = ()) -> list[str]:
    """Returns the addresses in the system's own table of what listens."""
    sockets = listening_sockets(host, 0, hosts)
    with contextlib.ExitStack() as stack:
        ports = {stack.enter_context(one).getsockname()[1] for one in sockets}
        found: list[str] = []
        for family in ("tcp", "tcp6"):
            with open(f"/proc/net/{family}", encoding="ascii") as table:
                for line in list(table)[1:]:
                    _, local, _, state, *_ = line.split()
                    address, _, port = local.partition(":")
                    if state == "0A" and int(port, 16) in ports:
                        words = [
                            bytes.fromhex(address)[i : i + 4]
                            for i in range(0, len(address) // 2, 4)
                        ]
                        found.append(str(ipaddress.ip_address(b"".join(w[::-1] for w in words))))
        return found


def test_loopback_stays_on_loopback() -> None:
    assert bound("127.0.0.1") == ["127.0.0.1"]


def test_every_interface_only_if_it_is_named_and_then_with_a_secret() -> None:
    assert bound("0.0.0.0") == ["0.0.0.0"]
    with pytest.raises(ValueError, match="This run has no secret"):
        required_secret("This run", ["127.0.0.1", "0.0.0.0"])


@pytest.mark.parametrize("resolved", [[], ["192.0.2.7"], ["0.0.0.0"]])
def test_localhost_is_loopback_whatever_it_resolves_to(monkeypatch, resolved) -> None:
    monkeypatch.setattr(module, "_resolved", lambda _: resolved)
    assert local_addresses("localhost") == ["127.0.0.1"]


def test_localhost_is_loopback_in_each_family() -> None:
    found = bound("localhost")
    assert found
    assert all(ipaddress.ip_address(address).is_loopback for address in found)


def test_address_in_the_network_is_the_only_one() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            pytest.skip("this machine is in no network")
        own = probe.getsockname()[0]
    assert bound(own, (own, "192.0.2.7")) == [own]
    assert bound(own) == [own]


@pytest.mark.usefixtures("names")
@pytest.mark.parametrize(
    ("host", "hosts", "wanted"),
    [
        ("here", ("here",), ["127.0.1.1"]),
        ("here", ("here", "127.0.0.1"), ["127.0.1.1"]),
        # Its own name is loopback only here, and the others reach it at another address.
        ("here", ("here", "there"), [""]),
        ("here", ("here", "gone"), [""]),
        ("here", (), [""]),
        ("service", ("service", "there"), [""]),
        ("gone", (), [""]),
    ],
)
def test_names_of_hosts(caplog, host, hosts, wanted) -> None:
    assert local_addresses(host, hosts) == wanted
    with caplog.at_level(logging.WARNING):
        for one in listening_sockets(host, 0, hosts):
            one.close()
    logged = f"Listening on all interfaces: {host} of the cluster is no address" in caplog.text
    assert logged == (wanted == [""])
    quiet = listening_sockets(host, 0, hosts, may_be_everywhere=False)
    assert bool(quiet) == (wanted != [""])
    for one in quiet:
        one.close()


def test_taken_port_is_an_error_and_leaves_nothing(monkeypatch) -> None:
    monkeypatch.setattr(module, "local_addresses", lambda *_: ["127.0.0.2", "127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listening_sockets("h", port)
        socket.create_server(("127.0.0.2", port)).close()

"""Addresses at which a task listens: those of its name, and no others."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket

import pytest

from stratagem.group.authentication import listening
from stratagem.group.authentication.listening import listening_sockets, local_addresses

_HOSTS = {"here": ["127.0.1.1"], "there": ["192.0.2.7"], "service": ["192.0.2.9"], "gone": []}


@pytest.fixture
def names(monkeypatch) -> None:
    """Names as Debian's /etc/hosts and a cluster's DNS have them."""
    resolved = listening._resolved
    monkeypatch.setattr(
        listening, "_resolved", lambda host: _HOSTS[host] if host in _HOSTS else resolved(host)
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


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_loopback_stays_on_loopback(host) -> None:
    assert bound(host) == ["127.0.0.1"]


@pytest.mark.parametrize("resolved", [[], ["192.0.2.7"], ["0.0.0.0"]])
def test_localhost_is_loopback_whatever_it_resolves_to(monkeypatch, resolved) -> None:
    monkeypatch.setattr(listening, "_resolved", lambda _: resolved)
    assert local_addresses("localhost") == ["127.0.0.1"]


def test_localhost_is_loopback_in_each_family() -> None:
    found = bound("localhost")
    assert found
    assert all(ipaddress.ip_address(address).is_loopback for address in found)


def test_other_machines_cannot_reach_a_port_on_loopback() -> None:
    (one,) = listening_sockets("127.0.0.1", 0)
    with one, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", one.getsockname()[1]), 10)


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


@pytest.mark.usefixtures("names")
def test_name_that_is_elsewhere_listens_everywhere() -> None:
    assert set(bound("service")) <= {"::", "0.0.0.0"}


def test_taken_port_is_an_error_and_leaves_nothing(monkeypatch) -> None:
    monkeypatch.setattr(listening, "local_addresses", lambda *_: ["127.0.0.2", "127.0.0.1"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            listening_sockets("h", port)
        socket.create_server(("127.0.0.2", port)).close()

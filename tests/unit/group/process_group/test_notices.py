"""Processes that wait for process 0 hear that it cannot listen."""

from __future__ import annotations

import contextlib
import socket

import pytest

from stratagem.group import notices
from stratagem.group.authentication.secret import Credentials, HandshakeLimits, Secret
from stratagem.group.member import Group
from stratagem.group.protocol import frame
from stratagem.group.verdict import GroupLimits
from stratagem.launch.plan.ports import free_ports
from tests.unit.group.authentication import peers
from tests.unit.group.process_group.members import identity, listed, together

# So long that a test which waited for it would be noticed.
_LIMITS = GroupLimits(join_s=600, peer_s=600)
_CREDENTIALS = Credentials(Secret("s" * 32))
_VERDICT = {"kind": "verdict", "error": "ValueError", "message": "m", "lost": None, "silent_s": 1}


@pytest.mark.parametrize("listens", [True, False])
def test_port_of_process_0_that_is_taken_ends_all_with_its_error(listens) -> None:
    """Also if the other program does not answer, or only holds the port for a connection."""
    ports = free_ports(3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0]))
        if listens:
            taken.listen()
        errors = together(3, lambda i: Group(listed(i, ports), _LIMITS, _CREDENTIALS))
    for index, error in enumerate(errors):
        assert isinstance(error, ValueError)
        assert f"worker 0 (host0:1) cannot listen on port {ports[0]}: Address already" in str(error)
        assert index == 0 or f"This is worker {index} (host{index}:1)" in str(error)


def test_process_0_does_not_wait_long_for_others(monkeypatch) -> None:
    monkeypatch.setattr(notices, "_LIMIT_S", 0.2)
    ports = free_ports(2)
    with (
        socket.create_server(("127.0.0.1", ports[0])),
        pytest.raises(ValueError, match="cannot listen"),
    ):
        Group(listed(0, ports), _LIMITS)


def test_port_for_notices_is_closed_once_a_process_has_joined() -> None:
    ports = free_ports(2)
    groups = together(2, lambda i: Group(listed(i, ports), _LIMITS))
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", ports[1]))
    finally:
        for group in groups:
            group.abandon()


def test_port_that_is_taken_here_keeps_no_process_from_joining() -> None:
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[1])):
        groups = together(2, lambda i: Group(listed(i, ports), _LIMITS))
    for group in groups:
        assert isinstance(group, Group)
        group.abandon()


@pytest.mark.parametrize("secret", ["", "s" * 32])
@pytest.mark.parametrize("sent", [b"", b"\0\0\0\2[]", frame({"kind": "beat"}), frame(_VERDICT)])
def test_only_a_verdict_of_the_run_ends_the_wait(secret, sent) -> None:
    ports = free_ports(2)
    is_notice = bool(secret) and sent == frame(_VERDICT)
    limits = GroupLimits(join_s=600 if is_notice else 0.5)

    def act(index: int) -> None:
        if index == 0:
            with peers.dialed(ports[1]) as connection, contextlib.suppress(ConnectionError):
                peers.prove(connection, peers.key("notice", secret), "worker 0")
                connection.sendall(sent)
                connection.recv(1)
        else:
            Group(listed(1, ports), limits, _CREDENTIALS)

    _, error = together(2, act)
    assert isinstance(error, ValueError if is_notice else TimeoutError), error


def test_cluster_without_addresses_has_no_notices() -> None:
    limits = HandshakeLimits()
    assert notices.listen_for_notice(identity(1, 2, 1), _CREDENTIALS, print, limits) is None

"""Members that have ended, and those that cannot be reached."""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

import pytest

from stratagem.group.authentication.secret import Credentials, Gate
from stratagem.group.elastic import inbox as reaching
from stratagem.group.elastic.inbox import PURPOSE, EndedError, Inbox, Peers
from stratagem.launch.plan.ports import free_ports

_PEER_S = 0.3


def _peers(port: int) -> Peers:
    addresses = [("127.0.0.1", 1), ("127.0.0.1", port)]
    return Peers(0, ["worker 0", "worker 1"], addresses, Credentials(), peer_s=_PEER_S)


def test_a_port_that_refuses_belongs_to_one_that_has_ended() -> None:
    peers = _peers(free_ports(1)[0])
    assert peers.is_lost(1)
    assert not peers.is_silent(1)
    with pytest.raises(EndedError):
        peers.dial_report(1)


def test_a_host_that_cannot_be_reached_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No route to it: a broken network must not look like the end of a process."""

    async def unreachable(*args: Any, **kwargs: Any) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr(reaching, "reach", unreachable)
    peers = _peers(1)
    assert not peers.is_lost(1)
    peers._silent_since[1] -= 2 * _PEER_S
    assert peers.is_lost(1)
    assert peers.is_silent(1)


def test_one_that_is_stopped_may_run() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = _peers(listener.getsockname()[1])
        assert not peers.is_lost(1)
        assert peers.is_silent(1)


@pytest.mark.parametrize("has_started", [False, True])
def test_another_program_at_the_port(has_started) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peers = _peers(listener.getsockname()[1])
        peers.have_started = has_started

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(
            EndedError if has_started else ValueError, match="Another program has taken port"
        ):
            peers.dial_report(1)
        thread.join()


@pytest.mark.parametrize(("expected", "is_lost"), [(7, False), (8, True)])
def test_another_process_at_the_address_of_a_member_proves_that_it_has_ended(
    expected, is_lost
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    peers = _peers(listener.getsockname()[1])
    peers.expected = {1: expected}
    with Gate([listener], Credentials(), Inbox(7).admit, purpose=PURPOSE):
        assert peers.is_lost(1) == is_lost
        assert not peers.is_silent(1)

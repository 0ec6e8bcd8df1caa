"""Sockets that one thread closes while another uses them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import numpy as np
import pytest

from stratagem.group.elastic.backed_rounds import Arrivals
from stratagem.group.elastic.peer_connections import (
    Brokenness,
    PeerConnections,
    PeerLostError,
    close_after_use,
)


def _swapping(own: socket.socket, check: Brokenness) -> tuple[Callable[[], object], object]:
    connections = PeerConnections(0, (0, 1), 0, {1: own}, check)
    array = np.zeros(3, np.float32)
    return (lambda: connections.reduce(array, array, np.add)), connections


def _arriving(own: socket.socket, check: Brokenness) -> tuple[Callable[[], object], object]:
    arrivals = Arrivals((0, 1), own)
    return (lambda: arrivals.arrive(1, check)), arrivals


@pytest.mark.parametrize("make", [_swapping, _arriving])
def test_a_socket_in_use_is_closed_when_its_user_has_noticed(make) -> None:
    """Its number would belong to the next file; the user would read what is not its own."""
    own, other = socket.socketpair()
    is_in_use, may_continue = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def check(waited_s: float) -> None:
        is_in_use.set()
        assert may_continue.wait(120)

    operate, connections = make(own, check)

    def use() -> None:
        try:
            operate()
        except PeerLostError as error:
            errors.append(error)

    user = threading.Thread(target=use)
    user.start()
    assert is_in_use.wait(120)
    closer = threading.Thread(target=connections.close)
    closer.start()
    while other.recv(4096):  # until the connection has ended
        pass
    assert own.fileno() >= 0
    may_continue.set()
    user.join(120)
    closer.join(120)
    assert len(errors) == 1
    assert own.fileno() == -1
    other.close()


def test_a_connection_that_has_ended_is_closed() -> None:
    own, other = socket.socketpair()
    own.close()
    close_after_use([own, other], threading.RLock())
    assert own.fileno() == other.fileno() == -1

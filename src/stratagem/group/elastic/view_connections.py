"""Connections of a new view: each member dials those with lower ids, and awaits the others."""

from __future__ import annotations

import contextlib
import socket
import time

from stratagem.group.elastic.exchange_times import ExchangeTimes
from stratagem.group.elastic.inbox import Inbox
from stratagem.group.elastic.peer_connections import Brokenness, PeerConnections, PeerLostError
from stratagem.group.elastic.reaching import Peers
from stratagem.group.elastic.views import View

_POLL_S = 0.01


def connect_view(
    view: View, peers: Peers, inbox: Inbox, check: Brokenness, times: ExchangeTimes | None = None
) -> PeerConnections:
    """Connects the members of a view; raises PeerLostError."""
    own = peers.own
    peers.expected = view.expected
    inbox.begin_view(view.number, view.expected)
    with contextlib.ExitStack() as stack:
        sockets: dict[int, socket.socket] = {}
        try:
            for member in view.members:
                if member < own:
                    connection = peers.dial_data(member, view.number)
                    sockets[member] = stack.enter_context(connection)
        except OSError as error:
            raise PeerLostError(str(error)) from error
        for member in view.members:
            if member > own:
                connection = _awaited(member, view, inbox, check)
                sockets[member] = stack.enter_context(connection)
        connections = PeerConnections(view.number, view.members, own, sockets, check, times)
        inbox.check_open()
        stack.pop_all()
    peers.have_started = True
    return connections


def _awaited(member: int, view: View, inbox: Inbox, check: Brokenness) -> socket.socket:
    """Returns the connection that a member opens for a view."""
    begun_s = time.monotonic()
    while (connection := inbox.take_data(view.number, member)) is None:
        with inbox.changed:
            inbox.changed.wait(_POLL_S)
        check(time.monotonic() - begun_s)
    return connection

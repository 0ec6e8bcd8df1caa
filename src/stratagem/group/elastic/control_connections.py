"""Connections of a view for the choice of participants, which the lowest member makes."""

from __future__ import annotations

import contextlib
import socket
import time

from stratagem.group.elastic.inbox import Inbox
from stratagem.group.elastic.peer_connections import Brokenness, PeerLostError
from stratagem.group.elastic.reaching import Peers
from stratagem.group.elastic.views import View

_POLL_S = 0.01


def connect_controls(
    view: View, peers: Peers, inbox: Inbox, check: Brokenness, stack: contextlib.ExitStack
) -> dict[int, socket.socket]:
    """Returns this member's connections, which the stack closes.

    On the lowest member these are the connections of all others; on another one, its own. Raises
    PeerLostError if the view is broken.
    """
    lowest, *others = view.members
    if peers.own != lowest:
        try:
            connection = peers.dial_control(lowest, view.number)
        except OSError as error:
            raise PeerLostError(str(error)) from error
        return {lowest: stack.enter_context(connection)}
    found: dict[int, socket.socket] = {}
    begun_s = time.monotonic()
    for member in others:
        while (connection := inbox.take_control(view.number, member)) is None:
            with inbox.changed:
                inbox.changed.wait(_POLL_S)
            check(time.monotonic() - begun_s)
        found[member] = stack.enter_context(connection)
    return found

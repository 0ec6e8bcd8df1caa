"""Connections and messages between the processes of an elastic group."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import select
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from stratagem.errors import explain
from stratagem.group.authentication.connections import MAX_FRAME_BYTES, frame, framed, reach
from stratagem.group.authentication.secret import Credentials
from stratagem.group.current import print_stacks
from stratagem.group.elastic.peer_connections import (
    Brokenness,
    ExchangeTimes,
    PeerConnections,
    PeerLostError,
)
from stratagem.group.elastic.views import View

# Framed messages over blocking sockets between members of an elastic group.


def send_message(connection: socket.socket, message: dict[str, Any], limit_s: float) -> None:
    """Sends a message; raises OSError."""
    connection.settimeout(limit_s)
    connection.sendall(frame(message))


def receive_message(connection: socket.socket, limit_s: float) -> dict[str, Any]:
    """Receives a message; raises OSError, TimeoutError among them."""
    connection.settimeout(limit_s)
    size = int.from_bytes(_receive(connection, 4), "big")
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"received a frame of {size} bytes, which is too large")
    return framed(_receive(connection, size))


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed by the other side")
        data += part
    return bytes(data)


_Key = TypeVar("_Key")
DATA, REPORT, PROBE, READY, STACKS = "data", "report", "probe", "ready", "stacks"
_ANSWER_S = 1.0
_NOT_A_MEMBER = explain(
    "The other members continued without this process.",
    expected="a process that answers within STRATAGEM_PEER_TIMEOUT_S.",
    fix="check if its host was stopped or cut off; raise the limit if that may take so long.",
    code="SG506",
)


class Stage(enum.StrEnum):
    """Stages of a process, as it answers probes."""

    STARTS = "starts"  # waits for the first view, with all others
    TRAINS = "trains"  # is a member
    WAITS = "waits"  # is a candidate: the others have trained when it started


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A process that waits to become a member at a place of the program."""

    incarnation: int
    place: str
    connection: socket.socket

    @property
    def has_ended(self) -> bool:
        """True if it has closed its connection, over which it sends nothing."""
        return bool(select.select([self.connection], [], [], 0)[0])


class Inbox:
    """Connections of other processes that wait for this one. Any thread may use it."""

    def __init__(self, incarnation: int = 0, label: str = "") -> None:
        self.changed = threading.Condition()
        self._label, self._has_printed = label, False
        self._about: dict[str, Any] = {
            "incarnation": incarnation,
            "stage": Stage.STARTS,
            "place": None,
            "num_calls": 0,
        }
        self._data: dict[tuple[int, int], socket.socket] = {}
        self._reports: dict[int, socket.socket] = {}
        self._reporters: dict[int, int] = {}  # their incarnations
        self._candidates: dict[int, Candidate] = {}
        self._expected: Mapping[int, int] | None = None
        self._is_closed = False

    def check_open(self) -> None:
        """Raises RuntimeError if this process has left the group."""
        if self._is_closed:
            raise RuntimeError("This process has left its elastic group.")

    def tell(self, **about: Any) -> None:
        """Changes what probes are answered."""
        with self.changed:
            self._about = self._about | about

    def admit(self, connection: socket.socket, claim: str) -> None:
        """Takes an authenticated connection by its claim."""
        kind, *words = claim.split()
        if kind == STACKS:
            connection.close()
            self.print_stacks()
            return
        with self.changed:
            if self._is_closed:
                connection.close()
            elif kind == DATA:
                _replace(self._data, (int(words[0]), int(words[1])), connection)
            elif kind == REPORT and self._expects(int(words[0]), int(words[1])):
                self._reporters[int(words[0])] = int(words[1])
                _replace(self._reports, int(words[0]), connection)
            elif kind == REPORT:
                _answer(connection, {"error": _NOT_A_MEMBER})
            elif kind == READY:
                self._add_candidate(int(words[0]), int(words[1]), words[2], connection)
            else:
                _answer(connection, self._about)
            self.changed.notify_all()

    def print_stacks(self) -> None:
        """Prints the stacks of this process, once: several members may be over a time limit."""
        with self.changed:
            has_printed, self._has_printed = self._has_printed, True
        if not has_printed:
            print_stacks(self._label)

    def _expects(self, member: int, incarnation: int) -> bool:
        """Returns True for a member; for any process before the first view."""
        return self._expected is None or self._expected.get(member) == incarnation

    def _add_candidate(
        self, member: int, incarnation: int, place: str, connection: socket.socket
    ) -> None:
        if self._about["stage"] != Stage.TRAINS:
            connection.close()
            return
        if (before := self._candidates.pop(member, None)) is not None:
            before.connection.close()
        self._candidates[member] = Candidate(incarnation, place, connection)

    def take_data(self, view: int, member: int) -> socket.socket | None:
        """Returns the connection of a member for the rounds of a view, once."""
        with self.changed:
            return self._data.pop((view, member), None)

    def take_report(self, member: int) -> socket.socket | None:
        """Returns the connection over which a member reports, once."""
        with self.changed:
            return self._reports.pop(member, None)

    def has_report(self) -> bool:
        """Returns True if a member reports that the view is broken."""
        return bool(self._reports)

    def has_candidate(self, place: str | None, members: Collection[int]) -> bool:
        """Returns True if a process waits at a place; members have ended, and are started again."""
        with self.changed:
            return any(
                one.place == place and member not in members
                for member, one in self._candidates.items()
            )

    def take_candidates(self, place: str, members: Collection[int]) -> dict[int, Candidate]:
        """Returns the processes that wait at a place and are no members, once."""
        taken: dict[int, Candidate] = {}
        with self.changed:
            for member, one in sorted(self._candidates.items()):
                if one.has_ended:
                    self._candidates.pop(member).connection.close()
                elif one.place == place and member not in members:
                    taken[member] = self._candidates.pop(member)
        return taken

    def begin_view(self, view: int, expected: Mapping[int, int]) -> None:
        """Closes connections for earlier views; refuses reports of other processes."""
        with self.changed:
            self._expected = dict(expected)
            for key in [key for key in self._data if key[0] < view]:
                self._data.pop(key).close()
            for member in list(self._reports):
                if not self._expects(member, self._reporters[member]):
                    _answer(self._reports.pop(member), {"error": _NOT_A_MEMBER})

    def close(self) -> None:
        """Closes all connections."""
        with self.changed:
            self._is_closed = True
            waiting = [one.connection for one in self._candidates.values()]
            for one in (*self._data.values(), *self._reports.values(), *waiting):
                one.close()
            self._data.clear()
            self._reports.clear()
            self._candidates.clear()


def _replace(connections: dict[_Key, socket.socket], key: _Key, connection: socket.socket) -> None:
    """Stores a connection, and closes that of an earlier attempt."""
    if (before := connections.get(key)) is not None:
        before.close()
    connections[key] = connection


def _answer(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with connection, contextlib.suppress(OSError):
        send_message(connection, dict(message), _ANSWER_S)


# Ways to reach the other processes of an elastic group.

PURPOSE = "elastic group"
_PROBE_S = 1.0


class EndedError(ConnectionError):
    """A process has ended: its port refuses connections, or belongs to another program."""


class Peers:
    """Ways to reach the processes of a group, by process id.

    `incarnation` is this process's own, by which others tell it from one with the same id.
    """

    def __init__(
        self,
        own: int,
        labels: Sequence[str],
        addresses: Sequence[tuple[str, int]],
        credentials: Credentials,
        *,
        peer_s: float,
        incarnation: int = 0,
    ) -> None:
        self.own, self.labels, self.incarnation = own, tuple(labels), incarnation
        self._addresses, self._credentials = tuple(addresses), credentials
        self._peer_s = peer_s
        self._silent_since: dict[int, float] = {}
        self.expected: dict[int, int] = {}  # incarnations of the members
        self.have_started = False  # then another program at an address has replaced a member

    @property
    def others(self) -> list[int]:
        """Ids of all other processes, members or not."""
        return [one for one in range(len(self.labels)) if one != self.own]

    def dial_data(self, member: int, view: int) -> socket.socket:
        """Returns a connection for the rounds of a view; raises OSError."""
        return self._dial(member, f"{DATA} {view} {self.own}", self._peer_s)

    def dial_report(self, member: int) -> socket.socket:
        """Returns a connection for a report; raises OSError."""
        return self._dial(member, f"{REPORT} {self.own} {self.incarnation}", self._peer_s)

    def dial_ready(self, member: int, place: str) -> socket.socket:
        """Returns a connection on which the next view with this process arrives; raises OSError."""
        claim = f"{READY} {self.own} {self.incarnation} {place}"
        return self._dial(member, claim, self._peer_s)

    def probe(self, member: int) -> dict[str, Any]:
        """Returns what a process says of itself; raises EndedError or another OSError."""
        limit_s = min(_PROBE_S, self._peer_s)
        with self._dial(member, PROBE, limit_s) as connection:
            return receive_message(connection, limit_s)

    def ask_for_stacks(self) -> None:
        """Makes the other members print their stacks, before this one ends at a time limit."""
        for member in self.expected:
            if member != self.own:
                with contextlib.suppress(OSError):
                    self._dial(member, STACKS, _PROBE_S).close()

    def is_lost(self, member: int) -> bool:
        """Returns True if a process has ended, or has not answered for the limit.

        Another incarnation of a member proves that the member has ended.
        """
        try:
            incarnation = self.probe(member).get("incarnation")
        except EndedError:
            self._silent_since.pop(member, None)
            return True
        except OSError:  # no answer, or no way to its host, which may be the network's fault
            since = self._silent_since.setdefault(member, time.monotonic())
            return time.monotonic() - since > self._peer_s
        self._silent_since.pop(member, None)
        return self.expected.get(member, incarnation) != incarnation

    def is_silent(self, member: int) -> bool:
        """Returns True if a lost process may still run: it did not answer, and refused nothing."""
        return member in self._silent_since

    def _dial(self, member: int, claim: str, limit_s: float) -> socket.socket:
        host, port = self._addresses[member]
        reaching = reach(
            host,
            port,
            self._credentials,
            claim,
            purpose=PURPOSE,
            server=self.labels[member],
            limit_s=limit_s,
        )
        try:
            return asyncio.run(reaching)
        except ConnectionRefusedError as error:
            raise EndedError(str(error)) from error
        except ValueError as error:
            if not self.have_started:
                raise
            raise EndedError(str(error)) from error


# Connections of a new view: each member dials those with lower ids, and awaits the others.

_VIEW_POLL_S = 0.01


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
            inbox.changed.wait(_VIEW_POLL_S)
        check(time.monotonic() - begun_s)
    return connection

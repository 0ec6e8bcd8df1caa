"""Connections that members of an elastic group open to each other, and where they arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, TypeVar

from stratagem.authentication import Credentials
from stratagem.authentication.connections import reach
from stratagem.frames import MAX_FRAME_BYTES, frame
from stratagem.messages import explain

__all__ = ["EndedError", "Inbox", "Peers", "receive_message", "send_message"]

_Key = TypeVar("_Key")
PURPOSE = "elastic group"
_REFUSAL_S = 1.0
_NOT_A_MEMBER = explain(
    "The other members continued without this process.",
    expected="a process that answers within STRATAGEM_PEER_TIMEOUT_S.",
    fix="check if its host was stopped or cut off; raise the limit if that may take so long.",
    code="SG506",
)
_DATA, _CONTROL, _REPORT, _PROBE = "data", "control", "report", "probe"


class EndedError(ConnectionError):
    """A process has ended: its port refuses connections, or belongs to another program."""


class Inbox:
    """Connections of other members that wait for this process. Any thread may use it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._data: dict[tuple[int, int, str], socket.socket] = {}
        self._reports: dict[int, socket.socket] = {}
        self._members: Collection[int] = ()
        self._is_closed = False

    def check_open(self) -> None:
        """Raises RuntimeError if this process has left the group."""
        if self._is_closed:
            raise RuntimeError("This process has left its elastic group.")

    def admit(self, connection: socket.socket, claim: str) -> None:
        """Takes an authenticated connection by its claim."""
        kind, *numbers = claim.split()
        with self.changed:
            if self._is_closed:
                connection.close()
            elif kind in (_DATA, _CONTROL):
                _replace(self._data, (int(numbers[0]), int(numbers[1]), kind), connection)
            elif kind == _REPORT and int(numbers[0]) in (self._members or (int(numbers[0]),)):
                _replace(self._reports, int(numbers[0]), connection)
            elif kind == _REPORT:
                _refuse(connection)
            else:
                connection.close()
            self.changed.notify_all()

    def take_data(self, view: int, member: int) -> socket.socket | None:
        """Returns the connection of a member for the rounds of a view, once."""
        with self.changed:
            return self._data.pop((view, member, _DATA), None)

    def take_control(self, view: int, member: int) -> socket.socket | None:
        """Returns the connection of a member for the choice of participants in a view, once."""
        with self.changed:
            return self._data.pop((view, member, _CONTROL), None)

    def take_report(self, member: int) -> socket.socket | None:
        """Returns the connection over which a member reports, once."""
        with self.changed:
            return self._reports.pop(member, None)

    def has_report(self) -> bool:
        """Returns True if a member reports that the view is broken."""
        return bool(self._reports)

    def begin_view(self, view: int, members: Collection[int]) -> None:
        """Closes connections for earlier views; refuses reports of other processes."""
        with self.changed:
            self._members = members
            for key in [key for key in self._data if key[0] < view]:
                self._data.pop(key).close()
            for member in [one for one in self._reports if one not in members]:
                _refuse(self._reports.pop(member))

    def close(self) -> None:
        """Closes all connections."""
        with self.changed:
            self._is_closed = True
            for one in (*self._data.values(), *self._reports.values()):
                one.close()
            self._data.clear()
            self._reports.clear()


def _replace(connections: dict[_Key, socket.socket], key: _Key, connection: socket.socket) -> None:
    """Stores a connection, and closes that of an earlier attempt."""
    if (before := connections.get(key)) is not None:
        before.close()
    connections[key] = connection


def _refuse(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        send_message(connection, {"error": _NOT_A_MEMBER}, _REFUSAL_S)


class Peers:
    """Ways to reach the members of a group, by process id."""

    def __init__(
        self,
        own: int,
        labels: Sequence[str],
        addresses: Sequence[tuple[str, int]],
        credentials: Credentials,
        *,
        peer_s: float,
    ) -> None:
        self.own, self.labels = own, tuple(labels)
        self._addresses, self._credentials = tuple(addresses), credentials
        self._peer_s = peer_s
        self._silent_since: dict[int, float] = {}
        self.have_started = False  # then another program at an address has replaced a member

    def dial_data(self, member: int, view: int) -> socket.socket:
        """Returns a connection for the rounds of a view; raises OSError."""
        return self._dial(member, f"{_DATA} {view} {self.own}", self._peer_s)

    def dial_control(self, member: int, view: int) -> socket.socket:
        """Returns a connection for the choice of participants in a view; raises OSError."""
        return self._dial(member, f"{_CONTROL} {view} {self.own}", self._peer_s)

    def dial_report(self, member: int) -> socket.socket:
        """Returns a connection for a report; raises OSError."""
        return self._dial(member, f"{_REPORT} {self.own}", self._peer_s)

    def is_lost(self, member: int) -> bool:
        """Returns True if a process has ended, or has not answered for the limit."""
        try:
            self._dial(member, _PROBE, min(1.0, self._peer_s)).close()
        except EndedError:
            self._silent_since.pop(member, None)
            return True
        except OSError:  # no answer, or no way to its host, which may be the network's fault
            since = self._silent_since.setdefault(member, time.monotonic())
            return time.monotonic() - since > self._peer_s
        self._silent_since.pop(member, None)
        return False

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
    try:
        message = json.loads(_receive(connection, size))
    except ValueError as error:
        raise ConnectionError(f"received no message: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError("received a frame that holds no JSON object")
    return message


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed by the other side")
        data += part
    return bytes(data)

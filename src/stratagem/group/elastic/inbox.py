"""Connections that other processes of an elastic group open to this one."""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import threading
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from stratagem.group.elastic.member_messages import send_message
from stratagem.messages import explain

_Key = TypeVar("_Key")
DATA, CONTROL, REPORT, PROBE, READY = "data", "control", "report", "probe", "ready"
_ANSWER_S = 1.0
_NOT_A_MEMBER = explain(
    "The other members continued without this process.",
    expected="a process that answers within STRATAGEM_PEER_TIMEOUT_S.",
    fix="check if its host was stopped or cut off; raise the limit if that may take so long.",
    code="SG506",
)


class Stage:
    """Stages of a process, as it answers probes."""

    STARTS, TRAINS, WAITS = "starts", "trains", "waits"


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

    def __init__(self, incarnation: int = 0, num_backups: int = 0) -> None:
        self.changed = threading.Condition()
        self._about: dict[str, Any] = {
            "incarnation": incarnation,
            "stage": Stage.STARTS,
            "place": None,
            "num_calls": 0,
            "num_backups": num_backups,
        }
        self._data: dict[tuple[int, int, str], socket.socket] = {}
        self._reports: dict[int, tuple[int, socket.socket]] = {}
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
        with self.changed:
            if self._is_closed:
                connection.close()
            elif kind in (DATA, CONTROL):
                _replace(self._data, (int(words[0]), int(words[1]), kind), connection)
            elif kind == REPORT and self._expects(int(words[0]), int(words[1])):
                self._add_report(int(words[0]), int(words[1]), connection)
            elif kind == REPORT:
                _answer(connection, {"error": _NOT_A_MEMBER})
            elif kind == READY:
                self._add_candidate(int(words[0]), int(words[1]), words[2], connection)
            else:
                _answer(connection, self._about)
            self.changed.notify_all()

    def _expects(self, member: int, incarnation: int) -> bool:
        """Returns True for a member; for any process before the first view."""
        return self._expected is None or self._expected.get(member) == incarnation

    def _add_report(self, member: int, incarnation: int, connection: socket.socket) -> None:
        if (before := self._reports.get(member)) is not None:
            before[1].close()
        self._reports[member] = incarnation, connection

    def _add_candidate(
        self, member: int, incarnation: int, place: str, connection: socket.socket
    ) -> None:
        if self._about["stage"] != Stage.TRAINS or self._about["num_backups"]:
            connection.close()
            return
        if (before := self._candidates.pop(member, None)) is not None:
            before.connection.close()
        self._candidates[member] = Candidate(incarnation, place, connection)

    def take_data(self, view: int, member: int) -> socket.socket | None:
        """Returns the connection of a member for the rounds of a view, once."""
        with self.changed:
            return self._data.pop((view, member, DATA), None)

    def take_control(self, view: int, member: int) -> socket.socket | None:
        """Returns the connection of a member for the choice of participants in a view, once."""
        with self.changed:
            return self._data.pop((view, member, CONTROL), None)

    def take_report(self, member: int) -> socket.socket | None:
        """Returns the connection over which a member reports, once."""
        with self.changed:
            return self._reports.pop(member, (0, None))[1]

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

    def take_candidates(
        self, place: str, members: Collection[int], most: int
    ) -> dict[int, Candidate]:
        """Returns up to `most` processes that wait at a place and are no members, once."""
        taken: dict[int, Candidate] = {}
        with self.changed:
            for member, one in sorted(self._candidates.items()):
                if one.has_ended:
                    self._candidates.pop(member).connection.close()
                elif len(taken) < most and one.place == place and member not in members:
                    taken[member] = self._candidates.pop(member)
        return taken

    def begin_view(self, view: int, expected: Mapping[int, int]) -> None:
        """Closes connections for earlier views; refuses reports of other processes."""
        with self.changed:
            self._expected = dict(expected)
            for key in [key for key in self._data if key[0] < view]:
                self._data.pop(key).close()
            for member, (incarnation, _) in list(self._reports.items()):
                if not self._expects(member, incarnation):
                    _answer(self._reports.pop(member)[1], {"error": _NOT_A_MEMBER})

    def close(self) -> None:
        """Closes all connections."""
        with self.changed:
            self._is_closed = True
            waiting = [one.connection for one in self._candidates.values()]
            reports = [one for _, one in self._reports.values()]
            for one in (*self._data.values(), *reports, *waiting):
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

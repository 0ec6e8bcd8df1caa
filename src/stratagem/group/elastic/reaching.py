"""Ways to reach the other processes of an elastic group."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from typing import Any

from stratagem.group.authentication.connections import reach
from stratagem.group.authentication.credentials import Credentials
from stratagem.group.elastic.inbox import CONTROL, DATA, PROBE, READY, REPORT
from stratagem.group.elastic.member_messages import receive_message

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

    def dial_control(self, member: int, view: int) -> socket.socket:
        """Returns a connection for the choice of participants in a view; raises OSError."""
        return self._dial(member, f"{CONTROL} {view} {self.own}", self._peer_s)

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

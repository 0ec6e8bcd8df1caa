"""Rounds with backup workers: the first members to arrive make them, the others get the results.

A member that is late takes no part in a round, but commits its results, of which the lowest
participant sends it a copy. Every member keeps the results until all have them, so that they can
still be delivered in the next view if any member is lost.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.group.elastic.arrivals import Arrivals, ArrivalsThread, RoundChoice
from stratagem.group.elastic.combined_rounds import CombinedRound, CombinedRounds
from stratagem.group.elastic.peer_connections import Brokenness, PeerConnections
from stratagem.group.elastic.views import View

# Results that a member keeps for those that lack them. One that lacks more is waited for, so that a
# pause of a member, however long, does not fill the memory of the others.
_MAX_KEPT_BYTES = 2**27
_MAX_BEHIND = 64


def scale_of_sums(lengths: Sequence[int] | None, ranks: Sequence[int], num_members: int) -> float:
    """Returns the factor by which a sum over some members stands for the rows of all.

    `lengths` are the rows of each member; None if all have as many.
    """
    if len(ranks) == num_members:
        return 1.0
    if lengths is None:
        return num_members / len(ranks)
    return sum(lengths) / sum(lengths[rank] for rank in ranks)


@dataclasses.dataclass
class _Round:
    """The round that is running."""

    number: int
    lengths: Sequence[int] | None
    participants: tuple[int, ...] = ()  # none before they are known
    is_late: bool = False
    results: list[bytes] = dataclasses.field(default_factory=list[bytes])
    num_operations: int = 0
    num_bytes: int = 0


class BackedRounds:
    """The rounds of one member that `num_backups` members may take no part in."""

    def __init__(self, own: int, num_backups: int) -> None:
        self._own, self._num_backups = own, num_backups
        self._kept = CombinedRounds()
        self._received: dict[int, CombinedRound] = {}
        self._members: tuple[int, ...] = (own,)
        self._connections: PeerConnections | None = None
        self._arrivals: Arrivals | None = None
        self._thread: ArrivalsThread | None = None
        self._round: _Round | None = None
        self._check: Brokenness = lambda waited_s: None

    # Views.

    def begin_view(
        self,
        view: View,
        connections: PeerConnections,
        controls: Mapping[int, socket.socket],
        check: Brokenness,
    ) -> None:
        """Begins a view; sends the members that are behind the rounds that they lack.

        `controls` are connections for the choice of participants: to the lowest member, or from all
        others. Raises PeerLostError if the view is broken.
        """
        self._members, self._connections, self._check = view.members, connections, check
        sockets = dict(controls)
        if self._own == view.members[0]:
            sockets[self._own], own = socket.socketpair()
            num_needed = max(1, len(view.members) - self._num_backups)
            passed = dict.fromkeys(view.members, view.num_rounds) | dict(view.behind)
            choice = RoundChoice(view.members, num_needed, passed, _MAX_BEHIND)
            self._thread = ArrivalsThread(view.members, sockets, choice)
        else:
            own = sockets[view.members[0]]
        self._arrivals = Arrivals(view.members, own)
        self._deliver(view, connections)

    def _deliver(self, view: View, connections: PeerConnections) -> None:
        behind = dict(view.behind)
        sender = next(member for member in view.members if member not in behind)
        if self._own == sender:
            for member, number in view.behind:
                for one in self._kept.after(number):
                    connections.send_combined([member], one.number, one.encode())
        elif self._own in behind:
            for expected in range(behind[self._own] + 1, view.num_rounds + 1):
                one = CombinedRound.decode(connections.receive_combined(sender))
                assert one.number == expected, (one.number, expected)
                self._received[one.number] = one

    def end_view(self) -> None:
        """Closes the connections of a view."""
        if self._thread is not None:
            self._thread.close()
        if self._arrivals is not None:
            self._arrivals.close()
        self._thread = self._arrivals = None

    def finish(self, number: int, limit_s: float) -> None:
        """Waits until the others have what they need of this member, before it leaves."""
        if self._connections is not None:
            self._connections.finish(limit_s)
        if self._thread is not None:
            self._thread.finish(number, limit_s)

    # Rounds.

    def begin(self, number: int, lengths: Sequence[int] | None) -> None:
        """Begins a round, with the rows of each member; None if all have as many."""
        self._round = _Round(number, lengths)
        if self.is_chosen(number):
            self._choose(self._known(number) or ())

    def end(self) -> None:
        """Ends a round: the next one is one of all members unless it begins here."""
        self._round = None

    def is_chosen(self, number: int) -> bool:
        """Returns True if others have begun a round without this member."""
        return self._known(number) is not None

    def _known(self, number: int) -> tuple[int, ...] | None:
        if (received := self._received.get(number)) is not None:
            return received.participants
        assert self._arrivals is not None
        return self._arrivals.chosen(number)

    def members_of(self, number: int) -> tuple[int, ...] | None:
        """Returns the members of the view in which a round ran that this one lacks."""
        received = self._received.get(number)
        return None if received is None else received.members

    @property
    def participants(self) -> tuple[int, ...] | None:
        """The members that take part in the round; None if it is one of all members."""
        return None if self._round is None else self._round.participants

    @property
    def is_late(self) -> bool:
        """True if this member takes no part in the round."""
        return self._round is not None and self._round.is_late

    @property
    def scale(self) -> float:
        """The factor of sums in the round."""
        one = self._round
        if one is None or not one.participants:
            return 1.0
        ranks = [self._members.index(member) for member in one.participants]
        return scale_of_sums(one.lengths, ranks, len(self._members))

    def run(
        self,
        operation: Callable[[PeerConnections], None],
        result: np.ndarray[Any, Any],
    ) -> None:
        """Writes the result of an operation, of which this member may be no part."""
        one, connections = self._round, self._connections
        assert one is not None
        assert connections is not None
        assert self._arrivals is not None
        if not one.participants:
            self._choose(self._arrivals.arrive(one.number, self._check))
        place, one.num_operations = one.num_operations, one.num_operations + 1
        one.num_bytes += result.nbytes
        if one.is_late:
            content = self._combined(one).results[place]
            result.view(np.uint8)[...] = np.frombuffer(content, np.uint8)
            return
        operation(connections)
        if len(one.participants) < len(self._members):
            one.results.append(result.tobytes())

    def _choose(self, participants: tuple[int, ...]) -> None:
        one, connections = self._round, self._connections
        assert one is not None
        assert connections is not None
        one.participants, one.is_late = participants, self._own not in participants
        if not one.is_late:
            connections.take_part(participants, self.scale)

    def _combined(self, one: _Round) -> CombinedRound:
        """Returns a round in which this member takes no part; raises PeerLostError."""
        assert self._connections is not None
        while one.number not in self._received:
            content = self._connections.receive_combined(one.participants[0])
            received = CombinedRound.decode(content)
            self._received[received.number] = received
        return self._received[one.number]

    def receive_if_late(self) -> bool:
        """Receives the round if this member takes no part in it, or returns False.

        Raises PeerLostError.
        """
        if self._round is None or not self._round.is_late:
            return False
        self._combined(self._round)
        return True

    def commit(self, number: int, *, send: bool) -> None:
        """Notes that this member has all values of a round.

        Keeps its results if some member lacks them, and sends them to those. `send` is False if the
        view is broken: the next one delivers them.
        """
        one = self._round
        if one is not None:
            self._keep(one, send=send)
        if self._arrivals is not None:
            self._arrivals.passed(number)
            self._kept.drop(self._arrivals.passed_by_all)
        if one is not None and self._thread is not None and one.num_bytes:
            most = _MAX_KEPT_BYTES // one.num_bytes
            self._thread.choice.max_behind = min(_MAX_BEHIND, max(1, most))

    def _keep(self, one: _Round, *, send: bool) -> None:
        if one.is_late:
            self._kept.keep(self._received.pop(one.number))
        elif len(one.participants) < len(self._members):
            combined = CombinedRound(
                one.number, self._members, one.participants, tuple(one.results)
            )
            self._kept.keep(combined)
            if send and self._own == one.participants[0]:
                assert self._connections is not None
                late = [member for member in self._members if member not in one.participants]
                self._connections.send_combined(late, one.number, combined.encode())

"""Rounds with backup workers: the first members to arrive make them, the others get the results.

A member that is late takes no part in a round, but commits its results, of which the lowest
participant sends it a copy. Every member keeps the results until all have them, so that they can
still be delivered in the next view if any member is lost.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import select
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.group.elastic.peer_connections import (
    Brokenness,
    PeerConnections,
    PeerLostError,
    close_after_use,
)
from stratagem.group.elastic.views import View

# Combined values of rounds in which some members took no part, kept until those have them.

# Number of the round, then the counts of members, participants and results.
_HEAD = struct.Struct("!QIII")


@dataclasses.dataclass(frozen=True)
class CombinedRound:
    """The results of a round's operations.

    `members` are the ids of the view in which it ran, `participants` of those whose values it
    combines.
    """

    number: int
    members: tuple[int, ...]
    participants: tuple[int, ...]
    results: tuple[bytes, ...]

    def encode(self) -> bytes:
        """Returns it as bytes."""
        sizes = [len(result) for result in self.results]
        counts = len(self.members), len(self.participants), len(sizes)
        ids = (*self.members, *self.participants)
        numbers = struct.pack(f"!{len(ids)}I{len(sizes)}Q", *ids, *sizes)
        head = _HEAD.pack(self.number, *counts)
        return b"".join((head, numbers, *self.results))

    @staticmethod
    def decode(content: bytes | bytearray) -> CombinedRound:
        """Returns the round whose bytes these are."""
        number, num_members, num_participants, num_results = _HEAD.unpack_from(content)
        num_ids = num_members + num_participants
        numbers = struct.Struct(f"!{num_ids}I{num_results}Q")
        found = numbers.unpack_from(content, _HEAD.size)
        place = _HEAD.size + numbers.size
        results: list[bytes] = []
        for size in found[num_ids:]:
            results.append(bytes(content[place : place + size]))
            place += size
        members, participants = found[:num_members], found[num_members:num_ids]
        return CombinedRound(number, members, participants, tuple(results))


class CombinedRounds:
    """Committed rounds that some member lacks, in their order."""

    def __init__(self) -> None:
        self._rounds: dict[int, CombinedRound] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def keep(self, one: CombinedRound) -> None:
        """Adds a round."""
        self._rounds[one.number] = one

    def drop(self, number: int) -> None:
        """Forgets the rounds up to a number, which all members have."""
        for key in [key for key in self._rounds if key <= number]:
            del self._rounds[key]

    def after(self, number: int) -> Sequence[CombinedRound]:
        """Returns the rounds after a number."""
        return [self._rounds[key] for key in sorted(self._rounds) if key > number]


# Choice of the members that take part in a round: the first ones that arrive at it.
#
# Each member tells the lowest one of the view when it arrives at a round, and when it has all
# values
# of it. A thread there, which waits for no computation, chooses the participants, and tells all.

_ARRIVED, _PASSED = 1, 2
_NOTICE = struct.Struct("!BQ")
_CHOSEN = struct.Struct("!QQ")  # round, last round that all members have; then a byte per member
_POLL_S = 0.2
# Members that come a little later than the first ones are waited for: their work is done already.
# In a fraction of the time between rounds, so that no round takes much longer for it.
_PATIENCE = 0.1
_NUM_INTERVALS = 16


@dataclasses.dataclass(frozen=True)
class Chosen:
    """The members that take part in a round, and the last round whose values all members have."""

    number: int
    participants: tuple[int, ...]
    passed_by_all: int


class RoundChoice:
    """The choice for one round after the other, from the members' notices; knows no sockets.

    `num_needed` members are enough for a round. `passed` has the last round whose values each
    member has; a member that lacks those of `max_behind` rounds is waited for.
    """

    def __init__(
        self, members: Sequence[int], num_needed: int, passed: Mapping[int, int], max_behind: int
    ) -> None:
        self._members, self._num_needed = tuple(members), num_needed
        self._passed = dict(passed)
        self._arrived: dict[int, int] = {}
        self._chosen = max(passed.values())
        self._enough_s: float | None = None
        self._chosen_s: float | None = None
        self._intervals: collections.deque[float] = collections.deque(maxlen=_NUM_INTERVALS)
        self.max_behind = max_behind

    def arrive(self, member: int, number: int, now_s: float) -> None:
        """Notes that a member is ready for a round."""
        self._arrived[member] = number
        self.note_passed(member, number - 1)
        if self._enough_s is None and len(self._present()) >= self._num_needed:
            self._enough_s = now_s
            if self._chosen_s is not None:
                self._intervals.append(now_s - self._chosen_s)

    def note_passed(self, member: int, number: int) -> None:
        """Notes that a member has all values of a round."""
        self._passed[member] = max(self._passed[member], number)

    def has_passed(self, number: int) -> bool:
        """Returns True if all members have the values of a round."""
        return min(self._passed.values()) >= number

    def choose(self, now_s: float) -> Chosen | None:
        """Returns the participants of the next round; None if some member is waited for."""
        present = self._present()
        if self._enough_s is None or not present:
            return None
        number = self._arrived[present[0]]
        missing = [member for member in self._members if member not in present]
        if any(number - self._passed[member] > self.max_behind for member in missing):
            return None
        if missing and now_s < self._enough_s + self._patience_s():
            return None
        self._chosen, self._chosen_s, self._enough_s = number, now_s, None
        return Chosen(number, present, min(self._passed.values()))

    def wait_s(self, now_s: float) -> float:
        """Returns the time after which another choice is possible without a notice."""
        if self._enough_s is None:
            return math.inf
        left_s = self._enough_s + self._patience_s() - now_s
        return left_s if left_s > 0 else math.inf

    def _present(self) -> tuple[int, ...]:
        return tuple(one for one in self._members if self._arrived.get(one, 0) > self._chosen)

    def _patience_s(self) -> float:
        return _PATIENCE * statistics.median(self._intervals) if self._intervals else 0.0


class ArrivalsThread:
    """Receives the notices of all members and tells them who takes part.

    If a member is lost, it ends all connections, by which the others learn of it.
    """

    def __init__(
        self, members: Sequence[int], sockets: Mapping[int, socket.socket], choice: RoundChoice
    ) -> None:
        self._members, self._sockets = tuple(members), dict(sockets)
        self._received = {member: bytearray() for member in sockets}
        self.choice = choice
        self._is_closed = False
        self._passed = threading.Condition()
        for one in self._sockets.values():
            _make_immediate(one)
        self._thread = threading.Thread(
            target=self._run, name="stratagem elastic arrivals", daemon=True
        )
        self._thread.start()

    def finish(self, number: int, limit_s: float) -> None:
        """Waits until all members have the values of a round, or are gone."""
        with self._passed:
            self._passed.wait_for(
                lambda: not self._received or self.choice.has_passed(number), limit_s
            )

    def close(self) -> None:
        """Ends the thread and the connections."""
        self._is_closed = True
        for one in self._sockets.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        for one in self._sockets.values():
            one.close()

    def _run(self) -> None:
        while self._received and not self._is_closed:
            poller = select.poll()
            by_file = {self._sockets[member].fileno(): member for member in self._received}
            for file in by_file:
                poller.register(file, select.POLLIN)
            for file, _ in poller.poll(1000 * min(_POLL_S, self.choice.wait_s(time.monotonic()))):
                self._read(by_file[file])
            chosen = self.choice.choose(time.monotonic())
            if chosen is not None:
                self._tell(chosen)
            with self._passed:
                self._passed.notify_all()

    def _read(self, member: int) -> None:
        received = self._received[member]
        try:
            part = self._sockets[member].recv(4096)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        if not part:
            self._received.pop(member)
            self._end_all()
            return
        received += part
        while len(received) >= _NOTICE.size:
            kind, number = _NOTICE.unpack_from(received)
            del received[: _NOTICE.size]
            if kind == _ARRIVED:
                self.choice.arrive(member, number, time.monotonic())
            else:
                self.choice.note_passed(member, number)

    def _tell(self, chosen: Chosen) -> None:
        flags = bytes(member in chosen.participants for member in self._members)
        message = _CHOSEN.pack(chosen.number, chosen.passed_by_all) + flags
        for one in self._sockets.values():
            with contextlib.suppress(OSError):  # the next read notices
                one.send(message)

    def _end_all(self) -> None:
        # Not closed: what was sent before must still arrive.
        for one in self._sockets.values():
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_WR)


class Arrivals:
    """A member's connection to the one that chooses the participants.

    One thread uses it; any thread may close it.
    """

    def __init__(self, members: Sequence[int], connection: socket.socket) -> None:
        self._members, self._connection = tuple(members), connection
        self._received = bytearray()
        self._chosen: dict[int, Chosen] = {}
        self._has_ended = False
        self.passed_by_all = 0
        self._use = threading.RLock()
        _make_immediate(connection)

    def arrive(self, number: int, check: Brokenness) -> tuple[int, ...]:
        """Returns the participants of a round, for which this member is ready.

        Raises PeerLostError if the view is broken.
        """
        self._notify(_ARRIVED, number)
        return self.wait(number, check)

    def wait(self, number: int, check: Brokenness) -> tuple[int, ...]:
        """Returns the participants of a round once they are chosen; raises as `arrive`."""
        begun_s = time.monotonic()
        with self._use:
            while (found := self.chosen(number)) is None:
                if self._has_ended:
                    raise PeerLostError("the connection to the lowest member was closed")
                poller = select.poll()
                poller.register(self._connection, select.POLLIN)
                if not poller.poll(_POLL_S * 1000):
                    check(time.monotonic() - begun_s)
        return found

    def passed(self, number: int) -> None:
        """Reports that this member has all values of a round."""
        for key in [key for key in self._chosen if key <= number]:
            del self._chosen[key]
        with contextlib.suppress(PeerLostError):  # the next round notices
            self._notify(_PASSED, number)

    def chosen(self, number: int) -> tuple[int, ...] | None:
        """Returns the participants of a round if they are known already."""
        self._read()
        found = self._chosen.get(number)
        return None if found is None else found.participants

    def close(self) -> None:
        """Closes the connection."""
        close_after_use([self._connection], self._use)

    def _notify(self, kind: int, number: int) -> None:
        try:
            with self._use:
                self._connection.send(_NOTICE.pack(kind, number))
        except OSError as error:
            # Choices that were sent before can still be read.
            self._has_ended = self._has_ended or not self._can_read()
            if self._has_ended:
                raise PeerLostError(f"the lowest member cannot be reached: {error}") from error

    def _can_read(self) -> bool:
        self._read()
        return bool(self._chosen)

    def _read(self) -> None:
        size = _CHOSEN.size + len(self._members)
        while not self._has_ended:
            try:
                with self._use:
                    part = self._connection.recv(4096)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            self._has_ended = not part
            self._received += part
        while len(self._received) >= size:
            number, passed_by_all = _CHOSEN.unpack_from(self._received)
            flags = self._received[_CHOSEN.size : size]
            participants = tuple(
                member for member, flag in zip(self._members, flags, strict=True) if flag
            )
            self._chosen[number] = Chosen(number, participants, passed_by_all)
            self.passed_by_all = max(self.passed_by_all, passed_by_all)
            del self._received[:size]


def _make_immediate(connection: socket.socket) -> None:
    """Makes a socket non-blocking, and its notices leave at once.

    Otherwise TCP holds a notice until the one before is acknowledged, 40 ms later.
    """
    connection.settimeout(0)
    if connection.family in (socket.AF_INET, socket.AF_INET6):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


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

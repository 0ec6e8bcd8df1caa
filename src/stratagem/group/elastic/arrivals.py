"""Choice of the members that take part in a round: the first ones that arrive at it.

Each member tells the lowest one of the view when it arrives at a round, and when it has all values
of it. A thread there, which waits for no computation, chooses the participants, and tells all.
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
from collections.abc import Mapping, Sequence

from stratagem.group.elastic.closing_sockets import close_after_use
from stratagem.group.elastic.peer_connections import Brokenness, PeerLostError

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

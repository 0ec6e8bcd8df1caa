"""Processes that join an elastic group: candidates, their admission, and the state they receive."""

from __future__ import annotations

import dataclasses
import json
import select
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.errors import DataLossError, UnavailableError, explain
from stratagem.group.elastic.peer_connections import PeerConnections, bytes_of
from stratagem.group.elastic.peers import EndedError, Inbox, Peers, Stage, receive_message
from stratagem.group.elastic.views import View

# Joining of a group that runs, as seen from the process that joins.

_LOOK_EVERY_S = 0.5
_RETRY_S = 0.1


@dataclasses.dataclass(frozen=True)
class RunningGroup:
    """Description of a group by its members.

    `place` is where processes can join now, or None. `num_calls` counts the calls of `fit` that
    have begun.
    """

    view: int
    members: tuple[int, ...]
    place: str | None
    num_calls: int

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> RunningGroup:
        """Returns it from the answer to a probe."""
        members = tuple(message["members"])
        return cls(message["view"], members, message["place"], message["num_calls"])

    def with_candidate(self, own: int) -> View:
        """Returns the view that can be expected with another process."""
        return View(self.view, tuple(sorted({*self.members, own})))


class Candidacy:
    """Waits to become a member of a group that runs."""

    def __init__(self, peers: Peers, inbox: Inbox, *, peer_s: float) -> None:
        self._peers, self._inbox, self._peer_s = peers, inbox, peer_s

    def look(self) -> RunningGroup:
        """Returns the group as its members see it; raises UnavailableError if all have ended."""
        silent_since = time.monotonic()
        while True:
            answers, num_silent = self._probe_all()
            if answers:
                return max(answers, key=lambda one: one.view)
            self._inbox.check_open()
            if not num_silent or time.monotonic() - silent_since > self._peer_s:
                raise self._all_ended()
            time.sleep(_RETRY_S)

    def _probe_all(self) -> tuple[list[RunningGroup], int]:
        """Returns the answers of members, and the number of processes that give none."""
        answers: list[RunningGroup] = []
        num_silent = 0
        for other in self._peers.others:
            try:
                answer = self._peers.probe(other)
            except EndedError:
                continue
            except OSError:
                num_silent += 1
                continue
            if answer.get("stage") == Stage.TRAINS:
                answers.append(RunningGroup.of_message(answer))
        return answers, num_silent

    def wait(self, place: str, look: Callable[[RunningGroup], bool]) -> View | None:
        """Waits at a place of the program until the members admit this process.

        `look` is called with the group from time to time. If it returns True, the wait is over,
        and this returns None. Raises UnavailableError once all members have ended.
        """
        while True:
            group = self.look()
            if look(group):
                return None
            try:
                connection = self._peers.dial_ready(group.members[0], place)
            except OSError:
                time.sleep(_RETRY_S)
                continue
            with connection:
                while not select.select([connection], [], [], _LOOK_EVERY_S)[0]:
                    now = self.look()
                    is_led_by_another = now.members[0] != group.members[0]
                    if is_led_by_another or (now != group and look(now)):
                        break
                    group = now
                else:
                    try:
                        return View.of_message(receive_message(connection, self._peer_s))
                    except OSError:
                        time.sleep(_RETRY_S)  # the member that led the group has ended

    def _all_ended(self) -> UnavailableError:
        return UnavailableError(
            explain(
                f"All members ended before {self._peers.labels[self._peers.own]} could join them.",
                expected="a group that still trains when a process joins.",
                fix="nothing, if the others are done. Otherwise read their errors first.",
                code="SG506",
            )
        )


# Agreement of the members of a view on when they admit others.

_WANTED, _PREPARED = 1, 2
_NO_ROUND = -1


@dataclasses.dataclass(frozen=True)
class SafePoint:
    """A place of the program at which processes can join, after a number of committed rounds."""

    place: str
    num_rounds: int


Delivery = Callable[[PeerConnections, int, Sequence[int]], None]
"""Called with the connections of a view, the member that sends the state, and the newcomers."""


class Admissions:
    """Flags of the members in each commit, and the conclusion that all draw.

    The lowest member says that it wants a change if a candidate waits. Each member says if it is
    prepared for one member more. All see the same answers in the same round. If all are prepared,
    they change the view at their next safe point.
    """

    def __init__(self, inbox: Inbox, own: int, *, prepares: bool) -> None:
        self._inbox, self._own, self._prepares = inbox, own, prepares
        self.prepared_for = 0
        self.wanted_size: int | None = None
        self.is_change_due = False
        self.newcomers: tuple[int, ...] = ()
        self.safe: SafePoint | None = None
        self._num_calls = 0
        self._deliver: Delivery | None = None

    def on_newcomers(self, deliver: Delivery) -> None:
        """Registers the function by which all members hand the state over to newcomers."""
        self._deliver = deliver

    def begin_call(self) -> int:
        """Counts a call in which processes can join; returns its number, from 1 on."""
        self._num_calls += 1
        self._inbox.tell(num_calls=self._num_calls)
        return self._num_calls

    def mark(self, place: str, num_rounds: int | None) -> None:
        """Marks a place at which processes can join.

        If a loss breaks the next round, the view after it can have them, if `num_rounds` are
        committed then.
        """
        is_other = self.safe is None or self.safe.place != place
        self.safe = SafePoint(place, _NO_ROUND if num_rounds is None else num_rounds)
        if is_other:
            self._inbox.tell(place=place)

    def pass_by(self) -> None:
        """Notes that a round follows which is no step: processes that join do not take part."""
        if self.safe is not None:
            self.mark(self.safe.place, None)

    def end_place(self) -> None:
        """Ends the place at which processes could join."""
        self.safe, self.is_change_due = None, False
        self._inbox.tell(place=None)

    def hand_over(self, connections: PeerConnections, view: View) -> None:
        """Hands the state over to newcomers, in a round."""
        source = next((one for one in view.members if one not in self.newcomers), None)
        if self.newcomers and source is not None and self._deliver is not None:
            self._deliver(connections, source, self.newcomers)

    @property
    def is_new(self) -> bool:
        """True if this process has joined without having the state of the others yet."""
        return self._own in self.newcomers

    def begin_view(self, view: View) -> None:
        """Starts again for other members."""
        self.newcomers, self.is_change_due = view.newcomers, view.is_change_due
        self.wanted_size = None

    def flag(self, view: View) -> int:
        """Returns this member's part of a commit."""
        size = len(view.members) + 1
        is_prepared = not self._prepares or self.prepared_for == size
        flag = _PREPARED if is_prepared else 0
        place = None if self.safe is None else self.safe.place
        if self._own == view.members[0] and self._inbox.has_candidate(place, view.members):
            flag |= _WANTED
        return flag

    def note(self, flags: Sequence[int]) -> None:
        """Takes what all members have said in a commit, by rank."""
        is_wanted = bool(flags[0] & _WANTED)
        self.wanted_size = len(flags) + 1 if is_wanted else None
        self.is_change_due = is_wanted and all(flag & _PREPARED for flag in flags)


# State of a running training, sent to members that have just joined.


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """State of a training: a JSON document, and arrays in an order that both sides know."""

    document: dict[str, Any]
    arrays: Sequence[np.ndarray[Any, Any]]


def hand_over(
    connections: PeerConnections,
    source: int,
    newcomers: Sequence[int],
    state: Callable[[], TrainingState] | None,
) -> None:
    """Sends the state of member `source` to newcomers; all other members call it as well.

    `state` returns it on the source, and is None on the others. Raises PeerLostError.
    """
    if state is None:
        for _ in range(3):
            connections.broadcast(source, newcomers, [])
        return
    sent = state()
    arrays = [np.asarray(array, order="C") for array in sent.arrays]
    buffers = [bytes_of(array) for array in arrays]
    layout = [
        [array.dtype.name, list(array.shape), zlib.crc32(buffer)]
        for array, buffer in zip(arrays, buffers, strict=True)
    ]
    text = json.dumps([sent.document, layout], separators=(",", ":")).encode()
    size = np.array([len(text), zlib.crc32(text)], np.uint64)
    connections.broadcast(source, newcomers, [bytes_of(size)])
    connections.broadcast(source, newcomers, [memoryview(text)])
    connections.broadcast(source, newcomers, buffers)


def receive(
    connections: PeerConnections,
    source: int,
    newcomers: Sequence[int],
    check: Callable[[dict[str, Any]], None],
) -> TrainingState:
    """Receives what `hand_over` sends; `check` raises an error for a document that does not fit.

    Raises PeerLostError, and DataLossError for data that was changed on its way.
    """
    size = np.zeros(2, np.uint64)
    connections.broadcast(source, newcomers, [bytes_of(size)])
    text = np.empty(int(size[0]), np.uint8)
    connections.broadcast(source, newcomers, [bytes_of(text)])
    _check_sum(zlib.crc32(bytes_of(text)), int(size[1]), "the description of the state")
    document, layout = json.loads(text.tobytes())
    check(document)
    arrays = [np.empty(shape, _dtype(name)) for name, shape, _ in layout]
    buffers = [bytes_of(array) for array in arrays]
    connections.broadcast(source, newcomers, buffers)
    for place, ((_, _, expected), buffer) in enumerate(zip(layout, buffers, strict=True)):
        _check_sum(zlib.crc32(buffer), expected, f"array {place}")
    return TrainingState(document, arrays)


def _dtype(name: object) -> np.dtype[Any]:
    # NumPy would parse anything else as an expression.
    if not str(name).isidentifier():
        raise DataLossError(f"received an array of dtype {name!r}")
    return np.dtype(str(name))


def _check_sum(found: int, expected: int, name: str) -> None:
    if found != expected:
        raise DataLossError(
            explain(
                f"The CRC-32 of {name} that a member sent is {expected:08x}, but that of what "
                f"arrived is {found:08x}.",
                expected="the bytes that were sent.",
                fix="start this process again, and check the memory and network of both hosts.",
                code="SG506",
            )
        )

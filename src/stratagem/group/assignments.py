"""Assignments of copied variables outside steps, compared between processes on process 0.

What one process alone assigns makes its copies differ from those of the others, and every later
step wrong. Between two shared calls, a process notes the last value of each variable that it
assigns, as a digest. It sends these notes when it begins a later call, and none if it assigned
nothing.
"""

from __future__ import annotations

import collections
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.errors import explain
from stratagem.group.verdict import Verdict

# Messages name one variable; which one of very many does not matter.
_MAX_SENT = 32
# A rate that changes with each step would otherwise cost as much as a small step. All processes
# have assigned between the same calls, and so send at the same ones.
_CALLS_A_MESSAGE = 64


@dataclasses.dataclass
class _Note:
    """The last assignment of a variable; `before` is the digest of the value that it had."""

    path: str
    before: int | None
    digest: int
    place: str


class AssignmentNotes:
    """Assignments of this process, until they are sent to process 0."""

    def __init__(self) -> None:
        self._notes: dict[int, _Note] = {}  # since the last shared call
        self._unsent: dict[int, _Note] = {}
        self._digest = 0
        self._next_at = 0

    def __bool__(self) -> bool:
        return bool(self._notes or self._unsent)

    def __contains__(self, number: int) -> bool:
        return number in self._notes

    def add(self, number: int, path: str, *, before: int | None, digest: int, place: str) -> None:
        """Adds an assignment of variable `number`, at a `place` of the program."""
        note = self._notes.get(number)
        if note is not None:
            before = note.before
        self._notes[number] = _Note(path, before, digest, place)

    def take(self, calls: int, *, is_last: bool = False) -> dict[str, Any] | None:
        """Returns the message to send before a shared call, or None; `calls` came before it.

        Notes of many calls go together, unless `is_last`. A process may set values for a while,
        such as averages to evaluate with, and set them back.
        """
        notes, self._notes = self._notes, {}
        changed = {n: note for n, note in notes.items() if note.before != note.digest}
        if changed:
            values = sorted((number, note.digest) for number, note in changed.items())
            self._digest = zlib.crc32(repr((calls, values)).encode(), self._digest)
            self._unsent |= changed
        if not self._unsent or (calls < self._next_at and not is_last):
            return None
        self._next_at = calls + _CALLS_A_MESSAGE
        unsent, self._unsent = self._unsent, {}
        sent = sorted(unsent.items())[:_MAX_SENT]
        return {
            "kind": "assigned",
            "calls": calls,
            "digest": self._digest,
            "notes": [[number, one.path, one.digest, one.place] for number, one in sent],
        }


@dataclasses.dataclass
class _Sent:
    """Notes of one process: path, digest and place by the number of the variable."""

    calls: int
    digest: int
    notes: Mapping[int, tuple[str, int, str]]


class Assignments:
    """The notes of all processes, on process 0.

    `calls` counts the shared calls that a process had begun, programs and exchanges. All processes
    assign between the same calls, so the oldest notes of each belong together.
    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = labels
        self._sent = [collections.deque[_Sent]() for _ in labels]
        self._calls = [0 for _ in labels]
        self._num_waiting = 0  # processes with notes that were not compared yet
        self._oldest: tuple[int, int] | None = None  # calls, and the process with these notes

    def add(self, process_id: int, message: dict[str, Any]) -> tuple[int, Verdict | None]:
        """Adds notes; returns how many of each process agree now, and a verdict for others."""
        notes = {number: (path, digest, place) for number, path, digest, place in message["notes"]}
        queue, before = self._sent[process_id], self._oldest
        if not queue:
            self._num_waiting += 1
            own = (message["calls"], process_id)
            self._oldest = own if before is None else min(before, own)
        queue.append(_Sent(message["calls"], message["digest"], notes))
        num_equal = 0
        while self._num_waiting == len(self._labels):
            first, *others = [queue[0] for queue in self._sent]
            for other_id, other in enumerate(others, 1):
                if (other.calls, other.digest) != (first.calls, first.digest):
                    return num_equal, self._verdict(0, other_id)
            for queue in self._sent:
                queue.popleft()
            heads = [(queue[0].calls, one) for one, queue in enumerate(self._sent) if queue]
            self._num_waiting, self._oldest = len(heads), min(heads, default=None)
            num_equal += 1
        if self._oldest is None or self._oldest == before:
            return num_equal, None
        behind = (one for one, calls in enumerate(self._calls) if self._lacks(one, calls))
        missing = next(behind, None)
        return num_equal, None if missing is None else self._verdict(self._oldest[1], missing)

    def move(self, process_id: int, calls: int) -> Verdict | None:
        """Records that a process has begun so many calls, and has sent all notes before them."""
        self._calls[process_id] = calls
        if self._oldest is not None and self._lacks(process_id, calls):
            return self._verdict(self._oldest[1], process_id)
        return None

    def settle(self) -> Verdict | None:
        """Returns a verdict if any notes are left, when all processes are in the same call."""
        missing = next((one for one, queue in enumerate(self._sent) if not queue), None)
        if self._oldest is None or missing is None:
            return None
        return self._verdict(self._oldest[1], missing)

    def _lacks(self, process_id: int, calls: int) -> bool:
        return self._oldest is not None and not self._sent[process_id] and calls > self._oldest[0]

    def _verdict(self, own_id: int, other_id: int) -> Verdict:
        """Describes a variable to which two processes did not assign the same value."""
        own, other = [next(iter(self._sent[one]), None) for one in (own_id, other_id)]
        if own is None or (other is not None and other.calls < own.calls):
            own_id, own, other_id, other = other_id, other, own_id, own
        assert own is not None
        mine = own.notes
        theirs = {} if other is None or other.calls != own.calls else other.notes
        number = _differing(mine, theirs)
        if number not in mine:
            own_id, mine, other_id, theirs = other_id, theirs, own_id, mine
        path, _, place = mine[number]
        label, other_label = self._labels[own_id], self._labels[other_id]
        difference = (
            f"{other_label} assigned another value, or before another step, at {theirs[number][2]}."
            if number in theirs
            else f"{other_label} did not assign it before the same call: its copy differs now."
        )
        return Verdict(
            "RuntimeError",
            explain(
                f"{label} assigned {path!r} outside a step, at {place}. {difference}",
                expected="the same values of variables on every process: each has a copy.",
                fix="run this line on all processes (a callback that assigns belongs to all of "
                "them), with the same value: sg.collectives.host.broadcast_object(value) sends "
                "that of process 0.",
                code="SG507",
            ),
        )


def _differing(
    mine: Mapping[int, tuple[str, int, str]], theirs: Mapping[int, tuple[str, int, str]]
) -> int:
    """Returns a variable with different digests; the first if none of those sent differ."""
    numbers = sorted(mine.keys() | theirs.keys())
    none = ("", None, "")
    differ = (n for n in numbers if mine.get(n, none)[1] != theirs.get(n, none)[1])
    return next(differ, numbers[0])

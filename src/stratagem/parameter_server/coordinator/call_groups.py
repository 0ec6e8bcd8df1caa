"""Groups of closures that one worker runs after each other: one message there, and one back.

Sending one message costs a coordinator several times as much as starting a short function, so
short functions travel together.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stratagem.group.transport.wire import Message

# Number of answers that a worker keeps, for messages that are sent again. So it gets fewer messages
# than this after one that it has not answered.
MAX_UNANSWERED = 4

# Part of its influence that a long call loses with each later one.
_FORGOTTEN = 0.1
_US = 1e6


@dataclasses.dataclass(frozen=True)
class SentCall:
    """One function call for a worker.

    `function` and `closure` are numbers. `is_rerun` is True if it may have run before. `packed` is
    the pickled arguments.
    """

    function: int
    closure: int
    is_rerun: bool
    packed: Any


@dataclasses.dataclass(frozen=True)
class Ended:
    """Outcome of one call: its pickled result, or its pickled error with `trace`, its traceback.

    `counted` is the metric counts of the function by number.
    """

    packed: Any
    duration_s: float = 0.0
    counted: dict[int, np.ndarray] = dataclasses.field(default_factory=dict[int, np.ndarray])
    trace: str | None = None


class RecentDuration:
    """Duration of a function's calls: the longest, which later calls make count less and less.

    `expected_s` is infinite before the first call has ended.
    """

    def __init__(self) -> None:
        self.expected_s = math.inf

    def note(self, duration_s: float) -> None:
        """Takes the duration of a call, in seconds."""
        before_s = 0.0 if math.isinf(self.expected_s) else (1 - _FORGOTTEN) * self.expected_s
        self.expected_s = max(duration_s, before_s)


def pack_calls(calls: Sequence[SentCall], fields: dict[str, Any]) -> Message:
    """Returns the message that runs calls in this order; `fields` are sent with them."""
    heads = [[one.function, one.closure, one.is_rerun, len(one.packed)] for one in calls]
    return Message("run", {**fields, "calls": heads}, [_joined([one.packed for one in calls])])


def calls_in(message: Message) -> Iterator[SentCall]:
    """Yields the calls of a message of `pack_calls`."""
    parts = _Parts(message.arrays[0])
    for function, closure, is_rerun, num_bytes in message.fields["calls"]:
        yield SentCall(function, closure, is_rerun, parts.take(num_bytes))


def pack_ended(ended: Sequence[Ended], fields: dict[str, Any]) -> Message:
    """Returns the answer to a message of `pack_calls`; it may end with a failed call."""
    heads = [
        [len(one.packed), round(one.duration_s * _US), one.trace, list(one.counted)]
        for one in ended
    ]
    counted = [count for one in ended for count in one.counted.values()]
    packed = _joined([one.packed for one in ended])
    return Message("ran", {**fields, "calls": heads}, [packed, *counted])


def ended_in(message: Message) -> Iterator[Ended]:
    """Yields the outcomes of calls, in their order."""
    packed, *counted = message.arrays
    parts, counts = _Parts(packed), iter(counted)
    for num_bytes, duration_us, trace, numbers in message.fields["calls"]:
        counted = {number: next(counts) for number in numbers}
        yield Ended(parts.take(num_bytes), duration_us / _US, counted, trace)


class _Parts:
    """Reader of bytes that were joined."""

    def __init__(self, joined: np.ndarray) -> None:
        self._left = joined.data

    def take(self, num_bytes: int) -> memoryview:
        """Returns the next bytes, without copying."""
        taken, self._left = self._left[:num_bytes], self._left[num_bytes:]
        return taken


def _joined(parts: Sequence[Any]) -> np.ndarray:
    only = parts[0] if len(parts) == 1 else b"".join(parts)  # one large argument is not copied
    return np.frombuffer(only, np.uint8)

"""Fakes: a notice source, a group that delays messages, an object with a JSON state."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

from stratagem.cluster.preemption.notices import Notice, NoticeSource
from stratagem.group.current import Identity
from stratagem.group.member import Listener
from stratagem.group.verdict import GroupLimits

LIMIT_S = 120.0


class Reader:
    """An object with a JSON state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def get_state(self) -> Any:
        return self.state

    def set_state(self, state: Any) -> None:
        self.state = state


class Bell(NoticeSource):
    """A notice source that the test rings."""

    def ring(self, *, ago_s: float = 0.0, grace_s: float | None = None) -> None:
        self.hear(
            Notice(
                source="bell",
                message="The bell was rung.",
                heard_at_s=time.monotonic() - ago_s,
                grace_s=grace_s,
            )
        )

    def _listen(self) -> None: ...

    def _end(self) -> None: ...


class Member:
    """One process's membership in a `Line`."""

    def __init__(self, line: Line, process_id: int) -> None:
        self._line = line
        labels = tuple(f"worker {index} (host{index}:1)" for index in range(line.count))
        self.process_id = process_id
        self.num_processes = line.count
        self.identity = Identity(process_id, labels, "127.0.0.1", 1)
        self.limits = GroupLimits(barrier_s=line.barrier_s)
        self.error: Exception | None = None
        self.listener: Listener | None = None

    def announce(self, topic: str, numbers: Sequence[int]) -> None:
        assert all(type(number) is int for number in numbers)
        self._line.sent.put((self.process_id, list(numbers)))

    def listen(self, topic: str, listener: Listener) -> None:
        self.listener = listener

    @contextlib.contextmanager
    def at(self, kind: Any, name: str) -> Iterator[None]:
        yield

    def check(self) -> None:
        if self.error is not None:
            raise self.error


class Line:
    """A group whose announcements arrive when the test calls `deliver`."""

    def __init__(self, count: int, *, barrier_s: float = LIMIT_S) -> None:
        self.count = count
        self.barrier_s = barrier_s
        self.sent: queue.Queue[tuple[int, list[int]]] = queue.Queue()
        self.members = [Member(self, index) for index in range(count)]

    def wait_for(self, count: int) -> None:
        """Waits until this many announcements can be delivered."""
        for told in [self.sent.get(timeout=LIMIT_S) for _ in range(count)]:
            self.sent.put(told)

    def deliver(self, *, to: Sequence[int] | None = None) -> tuple[int, list[int]]:
        """Delivers the oldest announcement to all or some members; waits for one if needed."""
        told = self.sent.get(timeout=LIMIT_S)
        for index in range(self.count) if to is None else to:
            listener = self.members[index].listener
            assert listener is not None
            listener(*told)
        return told

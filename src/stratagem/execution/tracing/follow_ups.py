"""Follow-ups: work that a step leaves to programs of its own, which follow it.

A step takes one of them at most, and only if nothing in it depends on the work afterwards.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator
from typing import Any, Protocol


class FollowUp(Protocol):
    """Work after each run of a step."""

    def before_step(self) -> None:
        """Prepares it. Called before the step's program starts."""
        ...

    def after_step(self) -> None:
        """Does the work. The step's program may still run."""
        ...


class _Taking(threading.local):
    is_on = False


_taking = _Taking()


@contextlib.contextmanager
def taking_follow_ups() -> Generator[None]:
    """Makes steps that are traced in the block leave work to programs of their own."""
    previous, _taking.is_on = _taking.is_on, True
    try:
        yield
    finally:
        _taking.is_on = previous


class FollowUps:
    """The follow-ups of a step that is being traced, and if the step ignores their results."""

    def __init__(self) -> None:
        self.work: list[FollowUp] = []
        self.are_needed = False
        self._changed: frozenset[int] = frozenset()  # ids of variables

    def leave(self, work: FollowUp, changed: frozenset[int]) -> bool:
        """Leaves work on variables, by id; returns False if the step has to do it."""
        if not _taking.is_on:
            return False
        if self.work:
            self.are_needed = True
            return False
        self.work.append(work)
        self._changed = changed
        return True

    def note_use(self, variable: Any) -> None:
        """Notes that the step reads or sets a variable."""
        if self._changed and id(variable) in self._changed:
            self.are_needed = True

"""Deduplication of tracebacks that several tasks print."""

from __future__ import annotations

import collections
import dataclasses

from stratagem.launch.tasks.output.tracebacks import (
    CHAINING_LINES,
    TRACEBACK_STARTS,
    find_error_line,
)

_MAX_LINES = 400
_MAX_TRACEBACKS = 32
# How long held lines wait for the rest of the traceback.
_PATIENCE_S = 1.0


@dataclasses.dataclass(eq=False)
class _Traceback:
    """A traceback as its first task prints it, and the lines that follow it."""

    task: str
    lines: list[str]

    @property
    def is_chained(self) -> bool:
        """True if the next traceback is chained to this one."""
        last = next((line for line in reversed(self.lines) if line.strip()), "")
        return last in CHAINING_LINES

    def fits(self, lines: list[str]) -> bool:
        """Returns True if the lines match over their shared length."""
        return all(one == other for one, other in zip(self.lines, lines, strict=False))


@dataclasses.dataclass
class _HeldLines:
    """Lines of a task that may repeat a traceback."""

    lines: list[str]
    candidates: list[_Traceback]
    since_s: float


class RepeatedTracebacks:
    """Holds a traceback while it equals another task's, then refers to that task."""

    def __init__(self) -> None:
        self._known: collections.deque[_Traceback] = collections.deque(maxlen=_MAX_TRACEBACKS)
        self._growing: dict[str, _Traceback] = {}
        self._held: dict[str, _HeldLines] = {}

    def pass_on(self, task: str, lines: list[str], now_s: float) -> list[str]:
        """Adds the next lines of a task; returns those to show now."""
        shown: list[str] = []
        for line in lines:
            if line in TRACEBACK_STARTS and task not in self._held:
                self._begin(task, line, now_s)
            if (held := self._held.get(task)) is None:
                self._record(task, line)
                shown.append(line)
                continue
            held.lines.append(line)
            fitting = [one for one in held.candidates if one.fits(held.lines)]
            if fitting and len(held.lines) < _MAX_LINES:
                held.candidates = fitting
                continue
            shown += self._released(task)
        return shown

    def overdue(self, task: str, now_s: float) -> list[str]:
        """Returns held lines that have waited too long, to show now."""
        held = self._held.get(task)
        return self._released(task) if held and now_s - held.since_s >= _PATIENCE_S else []

    def rest(self, task: str) -> list[str]:
        """Returns the held lines of a task that has ended, to show now."""
        self._growing.pop(task, None)
        return self._released(task) if task in self._held else []

    def _begin(self, task: str, line: str, now_s: float) -> None:
        if (own := self._growing.get(task)) is not None and own.is_chained:
            return
        self._growing.pop(task, None)
        candidates = [one for one in self._known if one.task != task and one.lines[0] == line]
        if candidates:
            self._held[task] = _HeldLines([], candidates, now_s)
        else:
            self._remember(task, [])

    def _remember(self, task: str, lines: list[str]) -> None:
        traceback = _Traceback(task, lines)
        self._growing[task] = traceback
        self._known.append(traceback)

    def _record(self, task: str, line: str) -> None:
        traceback = self._growing.get(task)
        if traceback is not None and len(traceback.lines) < _MAX_LINES:
            traceback.lines.append(line)

    def _released(self, task: str) -> list[str]:
        """Returns the held lines, with a repeated traceback reduced to one line."""
        held = self._held.pop(task)
        for one in held.candidates:
            common = _length_of_match(one.lines, held.lines)
            end = _end_of_error(held.lines)
            if end is not None and common >= end:
                error = f"{held.lines[end - 1]} (the same traceback as {one.task})"
                return [error, *held.lines[common:]]
        self._remember(task, [*held.lines])
        return held.lines


def _length_of_match(first: list[str], second: list[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _end_of_error(lines: list[str]) -> int | None:
    """Returns the number of lines up to the error of the last traceback, inclusive; or None."""
    starts = [number for number, line in enumerate(lines) if line in TRACEBACK_STARTS]
    error = find_error_line(lines, starts[-1])
    return None if error is None else error + 1

"""Puts the steps of a process together, so that a thousand of them are one line."""

from __future__ import annotations

import dataclasses

__all__ = ["StepLine", "StepLines"]


@dataclasses.dataclass(slots=True)
class StepLine:
    """Steps in a row.

    Args:
        begin_s: when the first began.
        end_s: when the last was done.
        step: the number of the last.
        num_steps: how many.
        duration_s: how long the calls took.
        keeping_s: how long the state was kept in memory, between the calls.
    """

    begin_s: float
    end_s: float
    step: int
    num_steps: int
    duration_s: float
    keeping_s: float = 0.0


class StepLines:
    """Collects steps, and says when a line of them is full.

    Args:
        interval_s: how long a line is.
        now_s: the time, on the clock of all other times here.
    """

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._line: StepLine | None = None
        # The end of the last step, or what came after it.
        self._mark_s = now_s
        self._written_s = now_s
        self._is_first = True
        self._keeping_s = 0.0  # of the line to come

    def add(
        self, step: int, num_steps: int, duration_s: float | None, now_s: float
    ) -> tuple[StepLine, ...]:
        """Adds the steps of a call.

        Args:
            step: the number of the last.
            num_steps: how many.
            duration_s: how long the call took; None for all the time since the step before.
            now_s: the end of the call.

        Returns:
            The lines that are full.
        """
        keeping_s, self._keeping_s = self._keeping_s, 0.0
        if duration_s is None:
            duration_s = max(0.0, now_s - self._mark_s - keeping_s)
        line = self._line
        if line is not None:
            is_next = line.step == step - num_steps
            if is_next and now_s - duration_s - line.end_s <= self._interval_s:
                line.end_s = self._mark_s = now_s
                line.step = step
                line.num_steps += num_steps
                line.duration_s += duration_s
                line.keeping_s += keeping_s
                if now_s - self._written_s < self._interval_s:
                    return ()
                self._line, self._written_s = None, now_s
                return (line,)
        full = self.take()
        begin_s = now_s - duration_s
        # What lies between two calls belongs to the line, unless it is longer than one.
        if 0 <= begin_s - self._mark_s <= self._interval_s:
            begin_s = self._mark_s
        else:
            keeping_s = 0.0
        new = StepLine(begin_s, now_s, step, num_steps, duration_s, keeping_s)
        self._mark_s = now_s
        is_full = self._is_first or now_s - self._written_s >= self._interval_s
        self._is_first = False
        if is_full:
            self._written_s = now_s
        else:
            self._line = new
        lines = (full, new) if is_full else (full,)
        return tuple(one for one in lines if one is not None)

    def keep(self, duration_s: float) -> None:
        """Notes that the state was kept in memory, after the step that was added last.

        Args:
            duration_s: how long that took.
        """
        self._keeping_s += duration_s

    def take(self) -> StepLine | None:
        """Takes out the line that is not full.

        Returns:
            It; None without steps.
        """
        line, self._line = self._line, None
        return line

    def interrupt(self, now_s: float, *, is_new_life: bool) -> None:
        """Notes that something else has happened, which belongs to no step.

        Args:
            now_s: when.
            is_new_life: the next step is the first after it, and a line of its own.
        """
        self._mark_s = max(self._mark_s, now_s)
        self._keeping_s = 0.0
        self._is_first = self._is_first or is_new_life

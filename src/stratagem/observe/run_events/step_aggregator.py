"""Aggregation of consecutive steps into one event per interval."""

from __future__ import annotations

import dataclasses

from stratagem.observe.run_events.records import StepEvent
from stratagem.observe.run_events.wait_clock import StepWaits

# Nothing was measured.
NO_WAITS = StepWaits()


@dataclasses.dataclass(slots=True)
class StepRecord:
    """Consecutive steps of one event.

    `duration_s` is the time inside the calls, `waits` the waits in it, and
    `keeping_s` the time of in-memory snapshots between them.
    """

    begin_s: float
    end_s: float
    step: int
    num_steps: int
    duration_s: float
    keeping_s: float = 0.0
    waits: StepWaits = NO_WAITS

    def event(self, time_s: float) -> StepEvent:
        """Returns the event of these steps, which ended at a time of `time.time`."""
        waits = self.waits
        return StepEvent(
            time_s=time_s,
            monotonic_s=self.end_s,
            step=int(self.step),
            num_steps=int(self.num_steps),
            duration_s=float(self.duration_s),
            elapsed_s=float(self.end_s - self.begin_s),
            keeping_s=float(self.keeping_s),
            waited_s=waits.waited_s,
            idle_s=waits.idle_s,
            input_s=waits.input_s,
            peers_s=waits.peers_s,
            transfer_s=waits.transfer_s,
            received_s=None if waits.received_s is None else dict(waits.received_s),
        )


class StepAggregator:
    """Aggregates steps into records that span at least `interval_s` each."""

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s = interval_s
        self._line: StepRecord | None = None
        # The end of the last step or event.
        self._mark_s = now_s
        self._written_s = now_s
        self._is_first = True
        self._keeping_s = 0.0  # for the next record

    def add(
        self,
        step: int,
        num_steps: int,
        duration_s: float | None,
        now_s: float,
        waits: StepWaits = NO_WAITS,
    ) -> tuple[StepRecord, ...]:
        """Adds the steps of a call that ended at `now_s`, and returns the completed records.

        `step` is the number of the last step. `duration_s` is None for the time since the previous
        step.
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
                line.waits = line.waits.plus(waits)
                if now_s - self._written_s < self._interval_s:
                    return ()
                self._line, self._written_s = None, now_s
                return (line,)
        full = self.take()
        begin_s = now_s - duration_s
        # A gap between calls belongs to the record unless it is longer than the interval.
        if 0 <= begin_s - self._mark_s <= self._interval_s:
            begin_s = self._mark_s
        else:
            keeping_s = 0.0
        new = StepRecord(begin_s, now_s, step, num_steps, duration_s, keeping_s, waits)
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
        """Adds the duration of an in-memory snapshot after the latest step."""
        self._keeping_s += duration_s

    def take(self) -> StepRecord | None:
        """Removes and returns the incomplete record, or None if there is none."""
        line, self._line = self._line, None
        return line

    def interrupt(self, now_s: float, *, is_restart: bool) -> None:
        """Ends the current gap at an event that belongs to no step.

        With `is_restart`, the next step is reported at once, in a record by itself.
        """
        self._mark_s = max(self._mark_s, now_s)
        self._keeping_s = 0.0
        self._is_first = self._is_first or is_restart

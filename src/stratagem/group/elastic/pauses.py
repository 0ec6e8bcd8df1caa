"""Pauses of training while the members of an elastic group change, as events of the run.

A pause begins when the last step before a change ends, and is over when the first step of the new
members ends, less the median time of a step before. Changes without a step in between share a
pause, and are one event.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Mapping

from stratagem.group.elastic.views import View
from stratagem.observe.run_events.process_writer import current_events
from stratagem.observe.run_events.records import MembersEvent
from stratagem.observe.run_events.writer import EventWriter

_NUM_STEPS = 100


class TrainingPauses:
    """Records the first members of a group of at most `most`, and each change of them.

    `tasks` has the name of each member's task.
    """

    def __init__(
        self,
        tasks: Mapping[int, str],
        *,
        most: int,
        find_events: Callable[[], EventWriter | None] = current_events,
    ) -> None:
        self._tasks, self._most, self._find_events = tasks, most, find_events
        self._steps_s: collections.deque[float] = collections.deque(maxlen=_NUM_STEPS)
        self._ended_s: float | None = None
        self._clear()

    def _clear(self) -> None:
        self._view: View | None = None
        self._lost: list[str] = []
        self._joined: list[str] = []
        self._change_s = 0.0

    def begin(self, view: View) -> None:
        """Records the members with whom this process begins."""
        if self._view is None:  # else the first step records the change
            self._write(view, time.monotonic(), None, None)

    def note_change(self, before: View, after: View, change_s: float) -> None:
        """Notes a change of the view, which took `change_s`; it is recorded with the next step."""
        old, new = before.expected.items(), after.expected.items()
        self._lost += [self._tasks[member] for member, _ in sorted(old - new)]
        self._joined += [self._tasks[member] for member, _ in sorted(new - old)]
        self._change_s += change_s
        self._view = after

    def end_step(self, number: int, end_s: float) -> None:
        """Takes the end of a step in view `number`; `end_s` is on the monotonic clock."""
        before_s, self._ended_s = self._ended_s, end_s
        view = self._view
        if view is None:
            if before_s is not None:
                self._steps_s.append(end_s - before_s)
        elif number >= view.number:
            step_s = statistics.median(self._steps_s) if self._steps_s else None
            pause_s = None
            if before_s is not None and step_s is not None:
                pause_s = max(0.0, end_s - before_s - step_s)
            self._write(view, end_s, pause_s, step_s)
            self._clear()

    def _write(self, view: View, end_s: float, pause_s: float | None, step_s: float | None) -> None:
        events = self._find_events()
        if events is not None:
            events.members(
                MembersEvent(
                    time_s=time.time() - time.monotonic() + end_s,
                    monotonic_s=end_s,
                    view=view.number,
                    lost=list(self._lost),
                    joined=list(self._joined),
                    num_members=len(view.members),
                    num_expected=self._most,
                    change_s=self._change_s,
                    pause_s=pause_s,
                    step_s=step_s,
                )
            )

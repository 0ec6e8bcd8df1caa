"""State of one process of a run, from its events as they arrive."""

from __future__ import annotations

import collections
import dataclasses
import enum

from stratagem.observe.run_events.reader import ProcessEvents
from stratagem.observe.run_events.records import (
    EndEvent,
    Event,
    FailureEvent,
    MemoryEvent,
    ProgressEvent,
    RestoredEvent,
    StartEvent,
    StepEvent,
)

# Processes give a sign of life every five seconds.
LOST_AFTER_S = 30.0
_WAITING_AFTER_S = 10.0
_RECENT_S = 10.0


class Phase(enum.Enum):
    """Phase of a process; the values are shown to users."""

    STARTING = "starting"
    RESTARTING = "restarting"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    LOST = "lost"
    FINISHED = "finished"


@dataclasses.dataclass(frozen=True)
class _RecentSteps:
    at_s: float
    event: StepEvent


class ProcessState:
    """Latest facts about a process. Times are on the run's shared clock, except `heard_s`."""

    def __init__(self, start: StartEvent) -> None:
        self.start = start
        self.last_s = start.time_s
        self.heard_s = start.time_s  # on the clock of the viewer
        self.step: int | None = None
        self.step_s: float | None = None
        self.memory: MemoryEvent | None = None
        self.end: EndEvent | None = None
        self.lost_s: float | None = None  # when another process reported it lost
        self.has_survivors = False  # others continue without it
        self._was_read = False
        self._is_first = True
        self._recent: collections.deque[_RecentSteps] = collections.deque()

    @property
    def task(self) -> str:
        """The task, such as "worker 2"."""
        return f"{self.start.task_type} {self.start.task_index}"

    def add(self, news: ProcessEvents, now_s: float) -> None:
        """Adds events that were read at `now_s` on the clock of the viewer."""
        is_new = not self._was_read
        for event in news.events:
            at_s = news.at_s(event)
            self.last_s = max(self.last_s, at_s)
            self._add_event(event, at_s)
        # Clocks may differ: only for events of the past is the time in the file all that we have.
        self.heard_s = min(now_s, self.last_s) if is_new else now_s
        self._was_read = True

    def phase(self, now_s: float) -> Phase:
        """Returns the phase at `now_s` on the clock of the viewer."""
        if self.end is not None or self.has_survivors:
            return self._last_phase()
        is_silent = now_s - self.heard_s > LOST_AFTER_S
        if self.start.task_type == "launcher":
            return Phase.RUNNING  # it has nothing to report between failures
        if is_silent or (self.lost_s is not None and self.lost_s >= self.last_s):
            return Phase.LOST
        if self.start.task_type in ("ps", "evaluator"):
            return Phase.RUNNING
        if self.step_s is None or self._is_first:
            return Phase.RESTARTING if self.start.attempt or self.step_s else Phase.STARTING
        idle_s = now_s - self.heard_s + self.last_s - self.step_s
        allowed_s = max(_WAITING_AFTER_S, 3 / (self.steps_per_s() or 1.0))
        return Phase.WAITING if idle_s > allowed_s else Phase.RUNNING

    def _last_phase(self) -> Phase:
        if self.end is not None and self.end.code == 0:
            return Phase.FINISHED
        return Phase.LOST if self.has_survivors else Phase.FAILED

    def steps_per_s(self) -> float | None:
        """Returns the speed over the last ten seconds of steps; None before the second line."""
        elapsed_s = sum(_elapsed_s(one.event) for one in self._recent)
        return sum(one.event.num_steps for one in self._recent) / elapsed_s if elapsed_s else None

    def host_s_per_step(self) -> float | None:
        """Returns the recent time per step in which the host did not wait; None if unknown."""
        if not self._recent or any(one.event.waited_s is None for one in self._recent):
            return None
        own_s = sum(_elapsed_s(one.event) - (one.event.waited_s or 0.0) for one in self._recent)
        return own_s / sum(one.event.num_steps for one in self._recent)

    def recent_lines(self) -> list[tuple[str, float, StepEvent]]:
        """Returns the recent lines of steps with the task and their times."""
        return [(self.task, one.at_s, one.event) for one in self._recent]

    def _add_event(self, event: Event, at_s: float) -> None:
        if isinstance(event, StepEvent):
            self.step, self.step_s = event.step, at_s
            if not self._is_first:  # the first steps contain the compilation
                self._remember(event, at_s)
            self._is_first = False
        elif isinstance(event, RestoredEvent):
            self.step, self._is_first = event.step, True
        elif isinstance(event, ProgressEvent):
            self.step = max(self.step or 0, event.step)
        elif isinstance(event, FailureEvent):
            self._is_first = True
        elif isinstance(event, MemoryEvent):
            self.memory = event
        elif isinstance(event, EndEvent):
            self.end = event

    def _remember(self, event: StepEvent, at_s: float) -> None:
        self._recent.append(_RecentSteps(at_s, event))
        while len(self._recent) > 1 and self._recent[0].at_s < at_s - _RECENT_S:
            self._recent.popleft()


def _elapsed_s(event: StepEvent) -> float:
    return max(event.elapsed_s, event.duration_s)

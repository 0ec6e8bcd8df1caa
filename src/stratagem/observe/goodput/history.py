"""Steps, checkpoint stalls and startups of each process, derived from its events."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from stratagem.observe.run_events.reader import ProcessEvents
from stratagem.observe.run_events.records import (
    FailureEvent,
    RestoredEvent,
    SaveEndedEvent,
    SaveStartedEvent,
    StepEvent,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInterval:
    """Consecutive steps of one process, up to number `step`.

    `share` is the fraction of the time spent in the steps, `snapshot_share` on in-memory snapshots.
    `is_first` is True for the first steps after a (re)start, whose time counts as starting.
    """

    begin_s: float
    end_s: float
    step: int
    num_steps: int
    share: float
    snapshot_share: float
    is_first: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The step from which a process resumes; later steps done before are repeated."""

    at_s: float
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointStall:
    """Time in which training waited for a checkpoint."""

    begin_s: float
    end_s: float
    failed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Startup:
    """Time from a start, a restore or a failure to the end of the first step after it."""

    begin_s: float
    end_s: float
    is_start: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """Activity of one process: steps, resume points, checkpoint stalls and startups."""

    intervals: tuple[StepInterval, ...]
    resume_points: tuple[ResumePoint, ...]
    stalls: tuple[CheckpointStall, ...]
    startups: tuple[Startup, ...]


def history_of(process: ProcessEvents) -> History:
    """Derives the history of a process from its events."""
    stalls = _stalls(process)
    stalled = _StallIndex(stalls)
    intervals: list[StepInterval] = []
    resume_points: list[ResumePoint] = []
    startups: list[Startup] = []
    begin_s, is_start, restored_step, has_steps = process.at_s(process.start), True, None, False
    for event in process.events:
        at_s = process.at_s(event)
        if isinstance(event, StepEvent):
            intervals.append(_interval(event, at_s, stalled, is_first=not has_steps))
            if not has_steps:
                step = event.step - event.num_steps if restored_step is None else restored_step
                resume_points.append(ResumePoint(at_s=begin_s, step=step))
                startups.append(Startup(begin_s=begin_s, end_s=at_s, is_start=is_start))
            has_steps = True
        elif isinstance(event, RestoredEvent | FailureEvent):
            if has_steps:
                begin_s, is_start, restored_step, has_steps = at_s, False, None, False
            if isinstance(event, RestoredEvent):
                restored_step = event.step
    if not has_steps:
        end_s = process.at_s(process.events[-1])
        startups.append(Startup(begin_s=begin_s, end_s=end_s, is_start=is_start))
        if restored_step is not None:
            resume_points.append(ResumePoint(at_s=begin_s, step=restored_step))
    return History(
        intervals=tuple(intervals),
        resume_points=tuple(resume_points),
        stalls=tuple(stalls),
        startups=tuple(startups),
    )


def _interval(
    event: StepEvent, at_s: float, stalled: _StallIndex, *, is_first: bool
) -> StepInterval:
    begin_s = at_s - max(0.0, event.elapsed_s)
    net_s = at_s - begin_s - stalled.between_s(begin_s, at_s)
    share = min(1.0, max(0.0, event.duration_s) / net_s) if net_s > 0 else 1.0
    snapshot_share = min(1.0 - share, max(0.0, event.keeping_s) / net_s) if net_s > 0 else 0.0
    return StepInterval(
        begin_s=begin_s,
        end_s=at_s,
        step=event.step,
        num_steps=max(1, event.num_steps),
        share=share,
        snapshot_share=snapshot_share,
        is_first=is_first,
    )


class _StallIndex:
    """Looks up how long a process waited for checkpoints in an interval."""

    def __init__(self, stalls: Iterable[CheckpointStall]) -> None:
        self._stalls = sorted(stalls, key=lambda stall: stall.begin_s)
        ends_s = (stall.end_s for stall in self._stalls)
        self._latest_ends_s = list(itertools.accumulate(ends_s, max))

    def between_s(self, begin_s: float, end_s: float) -> float:
        total_s = 0.0
        first = bisect.bisect_right(self._latest_ends_s, begin_s)
        for index in range(first, len(self._stalls)):
            stall = self._stalls[index]
            if stall.begin_s >= end_s:
                break
            total_s += max(0.0, min(stall.end_s, end_s) - max(stall.begin_s, begin_s))
        return total_s


def _stalls(process: ProcessEvents) -> list[CheckpointStall]:
    started_s: dict[int, float] = {}
    stalls: list[CheckpointStall] = []
    for event in process.events:
        if isinstance(event, SaveStartedEvent):
            started_s[event.step] = process.at_s(event)
        elif isinstance(event, SaveEndedEvent):
            end_s = process.at_s(event)
            begin_s = started_s.pop(event.step, end_s - max(0.0, event.duration_s))
            stall_s = min(max(0.0, event.stall_s), end_s - begin_s)
            failed = event.failed is not None
            stalls.append(CheckpointStall(begin_s=begin_s, end_s=begin_s + stall_s, failed=failed))
    return stalls


class RetainedSteps:
    """Counts the steps of an interval that no later restore discarded."""

    def __init__(self, resume_points: Iterable[ResumePoint]) -> None:
        ordered = sorted(resume_points, key=lambda point: point.at_s)
        self._times_s = [point.at_s for point in ordered]
        self._lowest = [point.step for point in ordered]
        for index in range(len(ordered) - 2, -1, -1):
            self._lowest[index] = min(self._lowest[index], self._lowest[index + 1])

    def num_useful(self, interval: StepInterval) -> int:
        """Returns how many of the steps were not repeated, counted from the first."""
        index = bisect.bisect_left(self._times_s, interval.end_s)
        if index == len(self._lowest):
            return interval.num_steps
        behind = max(0, interval.step - self._lowest[index])
        return max(0, interval.num_steps - behind)


class StepTimes:
    """Completion times of steps over all processes, evenly spaced within an interval."""

    def __init__(self, intervals: Iterable[StepInterval]) -> None:
        self._intervals = sorted(intervals, key=lambda interval: interval.end_s)
        self._ends_s = [interval.end_s for interval in self._intervals]
        self._longest_s = max(
            (interval.end_s - interval.begin_s for interval in self._intervals), default=0.0
        )

    def last_s(self, time_s: float) -> float | None:
        """Returns when the last step at or before `time_s` finished, or None."""
        index = bisect.bisect_right(self._ends_s, time_s)
        before = [self._ends_s[index - 1]] if index else []
        for interval in self._reaching(time_s, index):
            if interval.begin_s < time_s:
                spacing_s, num_done = _spacing(interval, time_s)
                if num_done >= 1:
                    before.append(interval.begin_s + num_done * spacing_s)
        return max(before, default=None)

    def next_s(self, time_s: float) -> float | None:
        """Returns when the first step after `time_s` finishes, or None."""
        index = bisect.bisect_right(self._ends_s, time_s)
        after = [self._ends_s[index]] if index < len(self._ends_s) else []
        for interval in self._reaching(time_s, index):
            spacing_s, num_done = _spacing(interval, max(time_s, interval.begin_s))
            after.append(min(interval.end_s, interval.begin_s + (num_done + 1) * spacing_s))
        return min(after, default=None)

    def _reaching(self, time_s: float, index: int) -> Sequence[StepInterval]:
        """Returns the intervals that end after `time_s` and may begin before it."""
        last = bisect.bisect_right(self._ends_s, time_s + self._longest_s)
        candidates = self._intervals[index : last + 1]
        return [one for one in candidates if one.begin_s < one.end_s and not one.is_first]


def _spacing(interval: StepInterval, time_s: float) -> tuple[float, int]:
    spacing_s = (interval.end_s - interval.begin_s) / interval.num_steps
    return spacing_s, int((time_s - interval.begin_s) / spacing_s)

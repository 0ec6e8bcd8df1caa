"""History of each process: steps, checkpoint stalls, startups, and failures with their recovery."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from stratagem.observe.events import (
    EndEvent,
    FailureEvent,
    NoticeEvent,
    ProcessEvents,
    RestartEvent,
    RestoredEvent,
    SaveEndedEvent,
    SaveStartedEvent,
    StartEvent,
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

    stalls: list[CheckpointStall]
    intervals: list[StepInterval] = dataclasses.field(default_factory=list[StepInterval])
    resume_points: list[ResumePoint] = dataclasses.field(default_factory=list[ResumePoint])
    startups: list[Startup] = dataclasses.field(default_factory=list[Startup])


def history_of(process: ProcessEvents) -> History:
    """Derives the history of a process from its events."""
    found = History(stalls=_stalls(process))
    stalled = _StallIndex(found.stalls)
    begin_s, is_start, restored_step, has_steps = process.at_s(process.start), True, None, False
    for event in process.events:
        at_s = process.at_s(event)
        if isinstance(event, StepEvent):
            found.intervals.append(_interval(event, at_s, stalled, is_first=not has_steps))
            if not has_steps:
                step = event.step - event.num_steps if restored_step is None else restored_step
                found.resume_points.append(ResumePoint(at_s=begin_s, step=step))
                found.startups.append(Startup(begin_s=begin_s, end_s=at_s, is_start=is_start))
            has_steps = True
        elif isinstance(event, RestoredEvent | FailureEvent):
            if has_steps:
                begin_s, is_start, restored_step, has_steps = at_s, False, None, False
            if isinstance(event, RestoredEvent):
                restored_step = event.step
    if not has_steps:
        end_s = process.at_s(process.events[-1])
        found.startups.append(Startup(begin_s=begin_s, end_s=end_s, is_start=is_start))
        if restored_step is not None:
            found.resume_points.append(ResumePoint(at_s=begin_s, step=restored_step))
    return found


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


# Failures of a run, with their detection and recovery times.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A failure of the group, however many processes reported it.

    Args:
        told_s: time of the first report.
        what: the lost task, or the error.
        sign_of_life_s: end of the last step before it, or of a checkpoint after that step; None if
            no step finished since the previous failure.
        resumed_s: end of the first step after it; None without one.
        silence_s: seconds since the last sign of life, as reported; None if unknown.
        step: number of shared programs that the lost task had begun; None if unknown.
        reported_by: the task that got the error; None if unknown.
    """

    told_s: float
    what: str
    sign_of_life_s: float | None
    resumed_s: float | None
    silence_s: float | None = None
    step: int | None = None
    reported_by: str | None = None

    @property
    def detect_s(self) -> float | None:
        """Seconds until the failure was detected, or None if unknown."""
        if self.sign_of_life_s is None:
            return self.silence_s
        return self.told_s - self.sign_of_life_s

    @property
    def resume_s(self) -> float | None:
        """Seconds from detection to the end of the next step; None without one."""
        return None if self.resumed_s is None else self.resumed_s - self.told_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class _FailureReport:
    at_s: float
    what: str
    # Time when the process started to train, or the launcher started the tasks.
    life_s: float
    silence_s: float | None = None
    lost: str | None = None
    step: int | None = None
    reported_by: str | None = None


def failures_of(
    processes: Sequence[ProcessEvents],
    histories: Sequence[History],
    *,
    lost: Collection[StartEvent] = (),
) -> tuple[Failure, ...]:
    """Finds the failures of a run, in order.

    Failures are reported by `failure` events and by `end` events with a nonzero code. Reports
    without a step in between count as one failure, unless the reporting process restored or started
    since. A process that restarts without any report also counts as a failure. `processes` are the
    training processes and the launcher, ordered by start time, and `histories` of the former. The
    ends of the `lost` ones, without which others continue, are no failures.

    A step counts when its line ends: at a failure and after a start, lines are written at once.
    """
    steps_s = sorted(one.end_s for history in histories for one in history.intervals)
    stalls = [stall for history in histories for stall in history.stalls]
    saves_s = sorted(stall.end_s for stall in stalls if not stall.failed)
    starts_s: dict[str, list[float]] = {}
    for process in processes:
        bisect.insort(starts_s.setdefault(process.task, []), process.at_s(process.start))
    failures: list[Failure] = []
    lost_s: dict[str, float] = {}
    for report in _reports(processes, lost):
        last = failures[-1] if failures else None
        if _is_known_loss(report, lost_s, starts_s):
            continue
        if report.lost is not None:
            lost_s[report.lost] = report.at_s
        is_over = last is None or (last.resumed_s is not None and last.resumed_s <= report.at_s)
        if last is None or is_over or report.life_s > last.told_s:
            num_done = bisect.bisect_right(steps_s, report.at_s)
            sign_s = steps_s[num_done - 1] if is_over and num_done else None
            num_saved = bisect.bisect_right(saves_s, report.at_s)
            saved_s = saves_s[num_saved - 1 : num_saved]  # the last one; empty without one
            failures.append(
                Failure(
                    told_s=report.at_s,
                    what=report.what,
                    sign_of_life_s=None if sign_s is None else max([sign_s, *saved_s]),
                    resumed_s=next(iter(steps_s[num_done : num_done + 1]), None),
                    silence_s=report.silence_s,
                    step=report.step,
                    reported_by=report.reported_by,
                )
            )
    return tuple(failures)


def _reports(
    processes: Sequence[ProcessEvents], lost: Collection[StartEvent]
) -> list[_FailureReport]:
    """Returns the failures that processes report, and those without a report, in order."""
    reports = [
        report
        for process in processes
        if process.start not in lost
        for report in _reported_failures(process)
    ]
    times_s = sorted(report.at_s for report in reports)
    for report, since_s in sorted(_implied_failures(processes, lost), key=lambda one: one[0].at_s):
        if not _has_any(times_s, since_s, report.at_s):
            reports.append(report)
        bisect.insort(times_s, report.at_s)
    return sorted(reports, key=lambda report: report.at_s)


def _is_known_loss(
    report: _FailureReport,
    lost_s: Mapping[str, float],
    starts_s: Mapping[str, Sequence[float]],
) -> bool:
    """Returns True if the task was already reported lost and has not started since."""
    if report.lost is None or report.lost not in lost_s:
        return False
    after_s = math.nextafter(lost_s[report.lost], math.inf)
    return not _has_any(starts_s.get(report.lost, ()), after_s, report.at_s)


def _has_any(times_s: Sequence[float], first_s: float, last_s: float) -> bool:
    """Returns True if ascending times have one from `first_s` to `last_s`."""
    index = bisect.bisect_left(times_s, first_s)
    return index < len(times_s) and times_s[index] <= last_s


def _reported_failures(process: ProcessEvents) -> Iterator[_FailureReport]:
    life_s, notice = process.at_s(process.start), None
    for event in process.events:
        at_s = process.at_s(event)
        if isinstance(event, RestoredEvent | RestartEvent):
            life_s = at_s
        elif isinstance(event, NoticeEvent):
            notice = event.reason
        elif isinstance(event, FailureEvent):
            what = f"{event.lost} lost" if event.lost else f"{process.task}: {event.reason}"
            yield _FailureReport(
                at_s=at_s,
                what=what,
                life_s=life_s,
                silence_s=event.silence_s,
                lost=event.lost,
                step=event.step,
                reported_by=event.reported_by,
            )
        elif isinstance(event, EndEvent) and event.code != 0:
            why = event.reason or notice or f"exit code {event.code}"
            # Other processes report the loss too, possibly a step later.
            yield _FailureReport(
                at_s=at_s, what=f"{process.task}: {why}", life_s=life_s, lost=process.task
            )


def _implied_failures(
    processes: Sequence[ProcessEvents], lost: Collection[StartEvent]
) -> Iterator[tuple[_FailureReport, float]]:
    """Yields implied failures, each with the earliest time of a report that would explain it."""
    latest: dict[str, ProcessEvents] = {}
    for process in processes:
        restarted_s = process.at_s(process.start)
        for event in process.events:
            if isinstance(event, RestartEvent):
                at_s = process.at_s(event)
                what = f"restart {event.attempt}: {event.cause}"
                yield _FailureReport(at_s=at_s, what=what, life_s=at_s), restarted_s
                restarted_s = at_s
        before = latest.get(process.task)
        is_unexplained = before is not None and before.start not in lost
        if before is not None and is_unexplained and process.trains and not _exited_cleanly(before):
            at_s = process.at_s(process.start)
            what = f"{process.task} exited without reporting"
            yield _FailureReport(at_s=at_s, what=what, life_s=at_s), _last_work_s(before)
        latest[process.task] = process


def _exited_cleanly(process: ProcessEvents) -> bool:
    return any(isinstance(event, EndEvent) and event.code == 0 for event in process.events)


def _last_work_s(process: ProcessEvents) -> float:
    """Returns the time of the last sign of work; a later report may explain the failure."""
    is_work = StartEvent | StepEvent | RestoredEvent
    return max(process.at_s(event) for event in process.events if isinstance(event, is_work))

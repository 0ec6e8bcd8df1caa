"""Goodput: the useful share of a run's wall time, and the causes of the rest.

Does not import JAX.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from stratagem.observe.events import (
    EndEvent,
    MembersEvent,
    ProcessEvents,
    RunEvents,
    RunFollower,
    StartEvent,
    StepEvent,
    read_run,
)
from stratagem.observe.history import (
    Failure,
    History,
    RetainedSteps,
    StepInterval,
    failures_of,
    history_of,
)
from stratagem.observe.process_writer import current_events, progress, step
from stratagem.observe.writer import EventWriter

__all__ = [
    "EventWriter",
    "RunFollower",
    "account_for",
    "current_events",
    "progress",
    "read_run",
    "step",
]


# Changes of an elastic group's members, each counted once for the run.


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberChange:
    """The beginning of an elastic group, or a change of its members, as all of them report it.

    Args:
        at_s: time when training stopped for it, or of the first report if that is unknown.
        lost: lost tasks, such as "worker 1".
        joined: tasks that joined.
        num_members: number of members after it.
        num_expected: number of members of a full group.
        change_s: longest time until the members were connected again.
        pause_s: seconds for which training stood still; None if unknown.
        resumed_s: end of the first step after it.
    """

    at_s: float
    lost: tuple[str, ...]
    joined: tuple[str, ...]
    num_members: int
    num_expected: int
    change_s: float
    pause_s: float | None
    resumed_s: float

    @property
    def cause(self) -> str | None:
        """The cause of its pause, one of `CAUSES`; None at the beginning of a group."""
        if self.pause_s is None and not (self.lost or self.joined):
            return None
        return "members joined" if self.joined and not self.lost else "members lost"


@dataclasses.dataclass
class _Reports:
    """Events about one view, by the process that wrote them."""

    first_s: float
    by_process: dict[StartEvent, tuple[float, MembersEvent]]


def member_changes(processes: Iterable[ProcessEvents]) -> tuple[MemberChange, ...]:
    """Returns the changes in order; `processes` are those of a run that train."""
    found = [
        (process.at_s(event), process, event)
        for process in processes
        for event in process.events
        if isinstance(event, MembersEvent)
    ]
    groups: list[_Reports] = []
    latest: dict[int, _Reports] = {}  # by view
    for at_s, process, event in sorted(found, key=lambda one: one[0]):
        group = latest.get(event.view)
        # A view of the same number belongs to a later group if its members started after it.
        is_later = group is None or (
            process.at_s(process.start) > group.first_s or process.start in group.by_process
        )
        if group is None or is_later:
            group = latest[event.view] = _Reports(at_s, {})
            groups.append(group)
        group.by_process[process.start] = at_s, event
    return tuple(sorted(map(_merged, groups), key=lambda change: change.at_s))


def _merged(group: _Reports) -> MemberChange:
    """Returns the change that takes longest; one that joins reports neither losses nor a pause."""
    reports = group.by_process.values()
    ordered = ((_length_s(one), len(one.lost + one.joined), at_s, one) for at_s, one in reports)
    _, _, resumed_s, event = max(ordered, key=lambda one: one[:3])
    return MemberChange(
        at_s=resumed_s - _length_s(event),
        lost=tuple(event.lost),
        joined=tuple(event.joined),
        num_members=event.num_members,
        num_expected=event.num_expected,
        change_s=max(one.change_s for _, one in reports),
        pause_s=event.pause_s,
        resumed_s=resumed_s,
    )


def _length_s(event: MembersEvent) -> float:
    """Returns the time of the pause and of the step after it; 0 if unknown."""
    return 0.0 if event.pause_s is None else event.pause_s + (event.step_s or 0.0)


def lost_processes(
    processes: Sequence[ProcessEvents], changes: Iterable[MemberChange]
) -> frozenset[StartEvent]:
    """Returns the starts of the processes without which the others have continued.

    A lost task is the latest process of it that made no step after the loss: one that is started
    again may have joined at once.
    """
    last_step_s = {
        process.start: max(
            (process.at_s(event) for event in process.events if isinstance(event, StepEvent)),
            default=0.0,
        )
        for process in processes
    }
    lost: set[StartEvent] = set()
    for change in changes:
        for task in change.lost:
            found = [
                process
                for process in processes
                if process.task == task
                and process.start not in lost
                and process.at_s(process.start) <= change.resumed_s
                and last_step_s[process.start] < change.resumed_s
            ]
            if found:
                lost.add(max(found, key=lambda one: one.at_s(one.start)).start)
    return frozenset(lost)


CAUSE_MEANINGS = {
    "useful": "steps that count",
    "repeated": "steps lost and run again",
    "members lost": "training stood still because members were lost",
    "members joined": "training stood still because members joined",
    "detecting": "from the last step to the detection of a failure",
    "restarting": "from detection to the next step",
    "saving": "training waited for a checkpoint",
    "starting": "start-up: from a start to the end of the first step",
    "waiting": "waiting for data, evaluation, everything else",
}
CAUSES = tuple(CAUSE_MEANINGS)

# If several apply at the same time, the first one counts. A step contains the pause before it.
_SAVED, _LOST, _JOINED, _KEPT, _REPEATED, _DETECTING, _RESTARTING, _NOT_SAVED = range(8)
_STARTING, _WAITING = range(8, 10)
_CAUSE_OF = {
    _SAVED: "saving",
    _LOST: "members lost",
    _JOINED: "members joined",
    _KEPT: "useful",
    _REPEATED: "repeated",
    _DETECTING: "detecting",
    _RESTARTING: "restarting",
    _NOT_SAVED: "saving",
    _STARTING: "starting",
    _WAITING: "waiting",
}


@dataclasses.dataclass(frozen=True)
class Span:
    """An interval of wall time with a single cause.

    Args:
        begin_s: start, in seconds after the run's start.
        end_s: end, in seconds after the run's start.
        cause: one of `CAUSES`.
    """

    begin_s: float
    end_s: float
    cause: str


def spans_of(
    histories: Sequence[History],
    failures: Iterable[Failure],
    changes: Sequence[MemberChange],
    retained: RetainedSteps,
    *,
    times_s: tuple[float, float, float],
) -> tuple[Span, ...]:
    """Returns consecutive spans.

    `times_s` has the beginning of the run, the first start of a process that trains, and the end.
    """
    begin_s, first_start_s, end_s = times_s
    layers = [_Layer(begin_s, first_start_s, _STARTING)]
    intervals = [one for history in histories if changes for one in history.intervals]
    steps_s = np.array([(one.begin_s, one.end_s) for one in intervals if not one.is_first])
    begins_s, ends_s = steps_s.reshape(-1, 2).T
    for history in histories:
        for one in history.intervals:
            if not one.is_first:
                part = retained.num_useful(one) / one.num_steps
                middle_s = one.begin_s + part * (one.end_s - one.begin_s)
                shares = (one.share, one.snapshot_share)
                layers.append(_Layer(one.begin_s, middle_s, _KEPT, *shares))
                layers.append(_Layer(middle_s, one.end_s, _REPEATED, *shares))
        for stall in history.stalls:
            rank = _NOT_SAVED if stall.failed else _SAVED
            layers.append(_Layer(stall.begin_s, stall.end_s, rank))
        for startup in history.startups:
            # The start of a member while the others train is none of the run.
            if not ((begins_s >= startup.begin_s) & (ends_s <= startup.end_s)).any():
                rank = _STARTING if startup.is_start else _RESTARTING
                layers.append(_Layer(startup.begin_s, startup.end_s, rank))
    for change in changes:
        if change.pause_s is not None:
            rank = _JOINED if change.cause == _CAUSE_OF[_JOINED] else _LOST
            layers.append(_Layer(change.at_s, change.at_s + change.pause_s, rank))
    for failure in failures:
        if failure.sign_of_life_s is not None:
            layers.append(_Layer(failure.sign_of_life_s, failure.told_s, _DETECTING))
        resumed_s = end_s if failure.resumed_s is None else failure.resumed_s
        layers.append(_Layer(failure.told_s, resumed_s, _RESTARTING))
    return tuple(_merged_spans(layers, begin_s, end_s))


@dataclasses.dataclass(frozen=True)
class _Layer:
    begin_s: float
    end_s: float
    rank: int
    share: float = 1.0
    snapshot_share: float = 0.0


def _merged_spans(layers: Iterable[_Layer], begin_s: float, end_s: float) -> Iterator[Span]:
    """Yields one span per run of moments with the same cause."""
    cause, from_s, to_s = "", 0.0, 0.0
    for moment in _sweep(layers, begin_s, end_s):
        length_s = moment.end_s - moment.begin_s
        done_s = moment.begin_s + moment.share * length_s
        parts = (
            (done_s, moment.rank),
            (min(done_s + moment.snapshot_share * length_s, moment.end_s), _SAVED),
            (moment.end_s, _WAITING),
        )
        for part_end_s, part_rank in parts:
            part_cause = _CAUSE_OF[part_rank]
            if part_end_s - begin_s <= to_s:
                continue
            if part_cause != cause:
                if cause:
                    yield Span(from_s, to_s, cause)
                cause, from_s = part_cause, to_s
            to_s = part_end_s - begin_s
    if cause:
        yield Span(from_s, to_s, cause)


def _sweep(layers: Iterable[_Layer], begin_s: float, end_s: float) -> Iterator[_Layer]:
    """Sweeps through time once; at each moment the layer with the lowest rank wins."""
    waiting = [layer for layer in layers if max(layer.begin_s, begin_s) < min(layer.end_s, end_s)]
    waiting.sort(key=lambda layer: layer.begin_s, reverse=True)
    edges = {edge for layer in waiting for edge in (layer.begin_s, layer.end_s)}
    inside = sorted(edge for edge in edges if begin_s < edge < end_s)
    # Of layers with the same rank, the least busy one counts: the others waited for it.
    active: list[tuple[int, float, float, float]] = []
    for from_s, to_s in itertools.pairwise([begin_s, *inside, end_s]):
        while waiting and waiting[-1].begin_s <= from_s:
            layer = waiting.pop()
            order = (layer.rank, layer.share, layer.snapshot_share, layer.end_s)
            heapq.heappush(active, order)
        while active and active[0][-1] <= from_s:
            heapq.heappop(active)
        rank, share, snapshot_share = active[0][:-1] if active else (_WAITING, 1.0, 0.0)
        yield _Layer(from_s, to_s, rank, share, snapshot_share)


_TIMES = ("at_s", "told_s", "sign_of_life_s", "resumed_s")
_Reported = TypeVar("_Reported", Failure, MemberChange)
_FAILURE_FIELDS = ("told_s", "what", "detect_s", "resume_s", "silence_s", "step", "reported_by")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """Breakdown of a run's wall time by cause.

    Args:
        begin_s: start of the run, in seconds since the epoch.
        whole_s: seconds from the first start to the last event.
        time_s: seconds for each cause in `CAUSES`; they sum to `whole_s`.
        spans: the same breakdown as consecutive intervals of time.
        num_steps: number of steps that count.
        num_repeated: number of steps lost and run again, counted once per repetition.
        failures: failures in order; their times are seconds after the run's start.
        is_over: True if each training task's last process recorded its exit.
        num_processes: number of event files read.
        problems: one line per file or line that could not be read.
        member_changes: changes of an elastic group's members in order; their times are seconds
            after the run's start.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sg.goodput.EventWriter(folder, "worker", 0, num_processes=1) as writer:
        ...         for step in range(1, 4):
        ...             writer.step(step)
        ...         writer.end()
        ...     account = sg.goodput.account_for(sg.goodput.read_run(folder))
        >>> account.num_steps, account.num_repeated, 0 <= account.goodput <= 1
        (3, 0, True)

    Source: specific to Stratagem.
    """

    begin_s: float
    whole_s: float
    time_s: dict[str, float]
    spans: tuple[Span, ...]
    num_steps: int
    num_repeated: int
    failures: tuple[Failure, ...]
    is_over: bool
    num_processes: int
    problems: tuple[str, ...]
    member_changes: tuple[MemberChange, ...] = ()

    @property
    def goodput(self) -> float:
        """Useful fraction of the wall time, from 0 to 1; 0 for an empty run."""
        return self.time_s["useful"] / self.whole_s if self.whole_s > 0 else 0.0

    @property
    def startup_s(self) -> float:
        """Seconds of start-up: the time with the cause `starting`."""
        return self.time_s["starting"]

    @property
    def goodput_after_startup(self) -> float | None:
        """Useful fraction of the wall time without start-up; None before the first step ended."""
        rest_s = self.whole_s - self.startup_s
        # Sums of spans may differ in the last digits.
        return min(1.0, self.time_s["useful"] / rest_s) if rest_s > 1e-6 else None

    def as_dict(self) -> dict[str, Any]:
        """Returns everything except the spans, ready for JSON.

        Returns:
            A dict of numbers and strings, and of nested lists and dicts of them.
        """
        detect_s = [one.detect_s for one in self.failures if one.detect_s is not None]
        resume_s = [one.resume_s for one in self.failures if one.resume_s is not None]
        return {
            "goodput": self.goodput,
            "goodput_after_startup": self.goodput_after_startup,
            "startup_s": self.startup_s,
            "begin_s": self.begin_s,
            "whole_s": self.whole_s,
            "time_s": dict(self.time_s),
            "num_steps": self.num_steps,
            "num_repeated": self.num_repeated,
            "is_over": self.is_over,
            "num_processes": self.num_processes,
            "time_to_detect_s": _median_and_worst(detect_s),
            "time_to_resume_s": _median_and_worst(resume_s),
            "failures": [
                {name: getattr(one, name) for name in _FAILURE_FIELDS} for one in self.failures
            ],
            "member_changes": [dataclasses.asdict(change) for change in self.member_changes],
            "problems": list(self.problems),
        }


def account_for(run: RunEvents) -> Account:
    """Breaks down the wall time from the first start to the last event.

    Training tasks run in lockstep: a step counts once, however many processes ran it. A process
    without which the others continue is no failure, and neither is its next start. See
    docs/how_to/goodput.md for the definition of each cause.

    Args:
        run: events of the run, from `read_run`.

    Returns:
        The breakdown; times by cause sum to the total.

    Example:
        >>> import tempfile
        >>> from stratagem.observe.goodput import EventWriter, read_run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with EventWriter(folder, "worker", 0, num_processes=1) as writer:
        ...         writer.step(1)
        ...         writer.end()
        ...     account = account_for(read_run(folder))
        >>> account.num_steps, account.failures, account.is_over
        (1, (), True)

    Source: specific to Stratagem.
    """
    trainers = [one for one in run.processes if one.trains]
    group = [one for one in run.processes if one.trains or one.start.task_type == "launcher"]
    histories = [history_of(process) for process in trainers]
    intervals = [interval for history in histories for interval in history.intervals]
    retained = RetainedSteps(point for history in histories for point in history.resume_points)
    changes = member_changes(trainers)
    lost = lost_processes(trainers, changes)
    failures = failures_of(group, histories, lost=lost)
    times_s = begin_s, _, end_s = _bounds(group)
    spans = spans_of(histories, failures, changes, retained, times_s=times_s)
    return Account(
        begin_s=begin_s,
        whole_s=end_s - begin_s,
        time_s=_time_by_cause(spans),
        spans=spans,
        num_steps=_num_useful(intervals, retained),
        num_repeated=_num_repeated(histories),
        failures=tuple(_relative_to(begin_s, failure) for failure in failures),
        is_over=_is_over([one for one in trainers if one.start not in lost]),
        num_processes=len(run.processes),
        problems=run.problems,
        member_changes=tuple(_relative_to(begin_s, change) for change in changes),
    )


def _bounds(processes: Sequence[ProcessEvents]) -> tuple[float, float, float]:
    """Returns the times of the first start, of the first one that trains, and of the last event."""
    times_s = [process.at_s(event) for process in processes for event in process.events]
    begin_s = min((process.at_s(process.start) for process in processes), default=0.0)
    starts_s = [process.at_s(process.start) for process in processes if process.trains]
    return begin_s, min(starts_s, default=begin_s), max(times_s, default=begin_s)


def _time_by_cause(spans: Sequence[Span]) -> dict[str, float]:
    return {
        cause: math.fsum(span.end_s - span.begin_s for span in spans if span.cause == cause)
        for cause in CAUSES
    }


def _is_over(trainers: Sequence[ProcessEvents]) -> bool:
    latest = {process.task: process for process in trainers}.values()
    return all(any(isinstance(event, EndEvent) for event in one.events) for one in latest)


def _num_useful(intervals: Iterable[StepInterval], retained: RetainedSteps) -> int:
    """Counts distinct steps that were not lost."""
    ranges = sorted(
        (interval.step - interval.num_steps, interval.step - interval.num_steps + useful)
        for interval in intervals
        if (useful := retained.num_useful(interval)) > 0
    )
    num_useful, reached = 0, -math.inf
    for first, last in ranges:
        num_useful += max(0, last - int(max(first, reached)))
        reached = max(reached, last)
    return num_useful


def _num_repeated(histories: Iterable[History]) -> int:
    """Sums how many steps the job was set back by each restore."""
    changes: list[tuple[float, int, int]] = []
    for history in histories:
        changes += [(interval.end_s, 0, interval.step) for interval in history.intervals]
        changes += [(point.at_s, 1, point.step) for point in history.resume_points]
    num_repeated, reached = 0, 0
    for _, is_resume_point, number in sorted(changes):
        if is_resume_point:
            num_repeated += max(0, reached - number)
            reached = min(reached, number)
        else:
            reached = max(reached, number)
    return num_repeated


def _relative_to(begin_s: float, one: _Reported) -> _Reported:
    """Returns a failure or a change with times after the beginning of the run."""
    times_s = {name: getattr(one, name, None) for name in _TIMES}
    known = {name: time_s - begin_s for name, time_s in times_s.items() if time_s is not None}
    return dataclasses.replace(one, **known)


def _median_and_worst(times_s: Sequence[float]) -> dict[str, float] | None:
    if not times_s:
        return None
    return {"median": statistics.median(times_s), "worst": max(times_s)}

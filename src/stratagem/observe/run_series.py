"""Time series of a whole run: loss, speed, stragglers, memory and checkpoints."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

from stratagem.observe.events import (
    MemoryEvent,
    ProcessEvents,
    ProgressEvent,
    RunEvents,
    SaveEndedEvent,
    StepEvent,
    WarningEvent,
)
from stratagem.observe.history import History, StepInterval, history_of
from stratagem.observe.stragglers import SettledLines, WorkerSummary, summaries_of, windows_of

NUM_COLUMNS = 80


@dataclasses.dataclass(frozen=True)
class Line:
    """Points of a chart's line, by seconds after the start of the run."""

    times_s: tuple[float, ...]
    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StragglerMap:
    """Delay per step of each worker over time: a row per worker, a column per interval of time.

    A delay is the worker's time per step in which it did not wait for devices, less the smallest
    such time of any worker in that column. NaN where the worker made no step.
    """

    tasks: tuple[str, ...]
    delays_s: tuple[tuple[float, ...], ...]

    @property
    def longest_s(self) -> float:
        """The longest delay; 0 without any."""
        values = [one for row in self.delays_s for one in row if not math.isnan(one)]
        return max(values, default=0.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Save:
    """A checkpoint, written by `num_processes` together; the stall is the longest of them."""

    at_s: float
    step: int
    stall_s: float
    duration_s: float
    is_asynchronous: bool
    failed: str | None
    num_processes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarningRow:
    """A warning with the processes that had it; the time is the first one's."""

    at_s: float
    tasks: tuple[str, ...]
    category: str
    text: str
    origin: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSeries:
    """Everything that a report draws, besides the account.

    `values` and `memory` have a line per name: a metric, or a process. `num_unmeasured` is the
    number of step lines without waits, from which no stragglers can be found. `workers` is empty
    without steps of several workers.
    """

    values: dict[str, Line]
    speed: Line
    stragglers: StragglerMap | None
    workers: tuple[WorkerSummary, ...]
    num_unmeasured: int
    host_memory: dict[str, Line]
    device_memory: dict[str, Line]
    saves: tuple[Save, ...]
    warnings: tuple[WarningRow, ...]
    step_s: float | None


def series_of(run: RunEvents, begin_s: float, whole_s: float) -> RunSeries:
    """Computes the series of a run from `begin_s` on, over `whole_s` seconds."""
    trainers = [process for process in run.processes if process.trains]
    histories = [(process, history_of(process)) for process in trainers]
    lines = [event for one in trainers for event in one.events if isinstance(event, StepEvent)]
    return RunSeries(
        values=_values(trainers, begin_s),
        speed=_speed(histories, begin_s, whole_s),
        stragglers=_stragglers(histories, begin_s, whole_s),
        workers=_workers(trainers, whole_s),
        num_unmeasured=sum(line.waited_s is None for line in lines),
        host_memory=_memory(run.processes, "host_bytes", begin_s),
        device_memory=_memory(run.processes, "device_bytes", begin_s),
        saves=_saves(trainers, begin_s),
        warnings=_warnings(run.processes, begin_s),
        step_s=_median_step_s(history for _, history in histories),
    )


def _values(trainers: Iterable[ProcessEvents], begin_s: float) -> dict[str, Line]:
    """Returns the values of the first process that has each one: in lockstep all are the same."""
    events = [
        (process.at_s(event) - begin_s, process.task, event)
        for process in trainers
        for event in process.events
        if isinstance(event, ProgressEvent)
    ]
    owners: dict[str, str] = {}
    points: dict[str, list[tuple[float, float]]] = {}
    for at_s, task, event in sorted(events, key=lambda one: one[:2]):
        for name, value in event.values.items():
            if owners.setdefault(name, task) == task:
                value = math.nan if value is None else value
                points.setdefault(name, []).append((at_s, value))
    return {name: _line(found) for name, found in points.items()}


def _line(points: Sequence[tuple[float, float]]) -> Line:
    return Line(tuple(at_s for at_s, _ in points), tuple(value for _, value in points))


def _columns(
    interval: StepInterval, begin_s: float, width_s: float
) -> Iterable[tuple[int, float, float]]:
    """Yields each column that an interval overlaps, with the seconds and the share of it there."""
    first_s, last_s = interval.begin_s - begin_s, interval.end_s - begin_s
    length_s = last_s - first_s
    column = max(0, min(NUM_COLUMNS - 1, int(first_s / width_s)))
    while column < NUM_COLUMNS and column * width_s < last_s:
        is_last = column == NUM_COLUMNS - 1
        until_s = last_s if is_last else min(last_s, (column + 1) * width_s)
        part_s = until_s - max(first_s, column * width_s)
        if part_s > 0 and length_s > 0:
            yield column, part_s, part_s / length_s
        column += 1


def _speed(
    histories: Sequence[tuple[ProcessEvents, History]], begin_s: float, whole_s: float
) -> Line:
    """Returns the steps per second of the fastest worker in each column, first steps excluded."""
    width_s = whole_s / NUM_COLUMNS
    if width_s <= 0:
        return Line((), ())
    by_task: dict[str, list[float]] = {}
    for process, history in histories:
        steps = by_task.setdefault(process.task, [0.0] * NUM_COLUMNS)
        for interval in history.intervals:
            if not interval.is_first:
                for column, _, share in _columns(interval, begin_s, width_s):
                    steps[column] += interval.num_steps * share
    if not any(map(any, by_task.values())):
        return Line((), ())
    fastest = [max(row[column] for row in by_task.values()) for column in range(NUM_COLUMNS)]
    times_s = tuple((column + 0.5) * width_s for column in range(NUM_COLUMNS))
    return Line(times_s, tuple(one / width_s for one in fastest))


def _stragglers(
    histories: Sequence[tuple[ProcessEvents, History]], begin_s: float, whole_s: float
) -> StragglerMap | None:
    width_s = whole_s / NUM_COLUMNS
    busy: dict[str, list[list[float]]] = {}
    for process, history in histories:
        lines = [event for event in process.events if isinstance(event, StepEvent)]
        for event, interval in zip(lines, history.intervals, strict=True):
            if event.waited_s is None or interval.is_first or width_s <= 0:
                continue
            sums = busy.setdefault(process.task, [[0.0, 0.0] for _ in range(NUM_COLUMNS)])
            for column, part_s, share in _columns(interval, begin_s, width_s):
                sums[column][0] += max(0.0, part_s - event.waited_s * share)
                sums[column][1] += interval.num_steps * share
    if len(busy) < 2:
        return None
    own_s = {
        task: [seconds / steps if steps > 0 else math.nan for seconds, steps in sums]
        for task, sums in busy.items()
    }
    fastest_s = [
        min((row[column] for row in own_s.values() if not math.isnan(row[column])), default=0.0)
        for column in range(NUM_COLUMNS)
    ]
    tasks = sorted(own_s, key=lambda task: (task.split()[0], int(task.split()[1])))
    delays = (
        tuple(one - fastest for one, fastest in zip(own_s[task], fastest_s, strict=True))
        for task in tasks
    )
    return StragglerMap(tasks=tuple(tasks), delays_s=tuple(delays))


def _workers(trainers: Iterable[ProcessEvents], whole_s: float) -> tuple[WorkerSummary, ...]:
    settled = SettledLines()
    lines = [line for process in trainers for line in settled.pick(process)]
    return summaries_of(windows_of(lines), whole_s)


def _memory(processes: Iterable[ProcessEvents], field: str, begin_s: float) -> dict[str, Line]:
    """Returns a line per task; a gap separates its processes."""
    points: dict[str, list[tuple[float, float]]] = {}
    for process in processes:
        found = [
            (process.at_s(event) - begin_s, float(value))
            for event in process.events
            if isinstance(event, MemoryEvent) and (value := getattr(event, field)) is not None
        ]
        if found:
            line = points.setdefault(process.task, [])
            line += [(found[0][0], math.nan), *found] if line else found
    return {task: _line(found) for task, found in points.items()}


def _saves(trainers: Iterable[ProcessEvents], begin_s: float) -> tuple[Save, ...]:
    """Returns the checkpoints; those of one step and one start of the group are one."""
    groups: dict[tuple[int, int], list[tuple[float, SaveEndedEvent]]] = {}
    for process in trainers:
        for event in process.events:
            if isinstance(event, SaveEndedEvent):
                key = (process.start.attempt, event.step)
                groups.setdefault(key, []).append((process.at_s(event) - begin_s, event))
    saves = [
        Save(
            at_s=max(at_s for at_s, _ in group),
            step=step,
            stall_s=max(event.stall_s for _, event in group),
            duration_s=max(event.duration_s for _, event in group),
            is_asynchronous=group[0][1].is_asynchronous,
            failed=next((event.failed for _, event in group if event.failed is not None), None),
            num_processes=len(group),
        )
        for (_, step), group in groups.items()
    ]
    return tuple(sorted(saves, key=lambda save: save.at_s))


def _warnings(processes: Iterable[ProcessEvents], begin_s: float) -> tuple[WarningRow, ...]:
    rows: dict[tuple[str, str], list[tuple[float, str, WarningEvent]]] = {}
    for process in processes:
        for event in process.events:
            if isinstance(event, WarningEvent):
                found = (process.at_s(event) - begin_s, process.task, event)
                rows.setdefault((event.category, event.text), []).append(found)
    merged = [
        WarningRow(
            at_s=min(at_s for at_s, _, _ in found),
            tasks=tuple(dict.fromkeys(task for _, task, _ in found)),
            category=category,
            text=text,
            origin=found[0][2].origin,
        )
        for (category, text), found in rows.items()
    ]
    return tuple(sorted(merged, key=lambda row: row.at_s))


def _median_step_s(histories: Iterable[History]) -> float | None:
    """Returns the median time of a step, weighted by steps, without first steps and gaps."""
    times = sorted(
        ((one.end_s - one.begin_s) * one.share / one.num_steps, one.num_steps)
        for history in histories
        for one in history.intervals
        if not one.is_first
    )
    half = sum(number for _, number in times) / 2
    for time_s, number in times:
        half -= number
        if half <= 0:
            return time_s
    return None

"""The workers for which the others wait, from the step times of a few seconds.

In lockstep all steps take the same time. What differs is the time in which a worker does its own
work: it reads its data, computes, and waits for no other. A worker is late if that time exceeds the
median of the others' in most bins of a window. It is slow in its input if most of the excess is a
wait for data, and otherwise in computing. Does not import JAX.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from stratagem.observe.events import (
    FailureEvent,
    MembersEvent,
    ProcessEvents,
    RestoredEvent,
    StartEvent,
    StepEvent,
)

MIN_SHARE = 0.1
"""Least excess, in steps. Equal machines differ by a few percent for minutes, by their clock rates
and neighbors, which is no reason to name one."""
# An excess must also exceed the standard error of its median by this factor, which chance does once
# in a thousand windows of equal workers.
_NUM_ERRORS = 3.0
# Standard error of a median of normal values, in median absolute deviations of one value.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826
# Steps of workers in lockstep take equally long, but for pauses that only some of them count.
_MAX_RATIO = 1.25
# A host that waits this much of a step for programs beside it does not hold up the others.
_IDLE_SHARE = 0.05

# Lines of steps that count, and their alignment.
#
# Workers in lockstep count the same steps, but each writes its lines at moments of its own. A bin
# is a line of one worker; the others' lines are averaged over the same steps. So clocks of
# different machines need not agree.

MIN_STEPS = 5
"""Steps of a window; the time of fewer may be a pause of a machine."""
WINDOW_S = 10.0
"""Length of a window: ten lines, enough for a median, and short beside any reaction to it."""
# Rounding, in the share of a bin's steps that a worker's lines must cover.
_COVERED = 0.999


class SettledLines:
    """Picks the lines of steps that say how fast a worker is, from events as they arrive.

    It leaves out the first line after a start, a restored state, a failure and a change of the
    members, which contains a compilation or a pause.
    """

    def __init__(self) -> None:
        self._settled: set[StartEvent] = set()

    def pick(self, news: ProcessEvents) -> list[tuple[str, float, StepEvent]]:
        """Returns new lines of a process with its task and their time on the run's clock."""
        found: list[tuple[str, float, StepEvent]] = []
        if not news.trains:
            return found
        for event in news.events:
            if isinstance(event, StepEvent):
                if news.start in self._settled:
                    found.append((news.task, news.at_s(event), event))
                self._settled.add(news.start)
            elif isinstance(event, RestoredEvent | FailureEvent | MembersEvent):
                self._settled.discard(news.start)
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """Seconds per step of one worker. None is not measured.

    `busy_s` is its own work, of which `input_s` is the wait for its own data. `idle_s` is the wait
    for programs that run beside the host, which may be computing or waiting. `peers_s` is the
    known wait for other workers, and `transfer_s` the time of sending and receiving.
    """

    step_s: float
    busy_s: float
    idle_s: float | None = None
    input_s: float | None = None
    peers_s: float | None = None
    transfer_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive steps: in each bin, the step times of the workers that ran all steps of it."""

    bins: tuple[Mapping[str, WorkerTimes], ...]
    sizes: tuple[int, ...]

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return sum(self.sizes)


def windows_of(
    lines: Iterable[tuple[str, float, StepEvent]], *, window_s: float = WINDOW_S
) -> list[Window]:
    """Aligns lines of steps, given with their task and the time at which they were written.

    Lines without measured waits are left out. Steps that are run again, after a restart, begin a
    new window.
    """
    measured = [line for line in sorted(lines, key=lambda line: line[1]) if _is_measured(line[2])]
    return [
        window for segment in _segments(measured) for window in _grouped(_bins(segment), window_s)
    ]


def _is_measured(event: StepEvent) -> bool:
    return event.waited_s is not None and event.num_steps > 0


def _segments(
    lines: Sequence[tuple[str, float, StepEvent]],
) -> list[dict[str, list[StepEvent]]]:
    """Splits lines where a worker runs a step again; returns the lines of each task."""
    segments: list[dict[str, list[StepEvent]]] = [{}]
    for task, _, event in lines:
        own = segments[-1].setdefault(task, [])
        if own and event.step - event.num_steps < own[-1].step:
            own = []
            segments.append({task: own})
        own.append(event)
    return segments


def _bins(lines: Mapping[str, Sequence[StepEvent]]) -> list[tuple[int, dict[str, WorkerTimes]]]:
    """Returns the number of steps and the step times of each bin, in order."""
    places = dict.fromkeys(sorted(lines), 0)
    bins: list[tuple[int, dict[str, WorkerTimes]]] = []
    begin = 0
    while True:
        for task, place in places.items():
            while place < len(lines[task]) and lines[task][place].step <= begin:
                place += 1
            places[task] = place
        heads = [lines[task][place] for task, place in places.items() if place < len(lines[task])]
        if not heads:
            return bins
        begin = max(begin, min(head.step - head.num_steps for head in heads))
        end = next(head.step for head in heads if head.step - head.num_steps <= begin)
        found = {
            task: times
            for task, place in places.items()
            if (times := _average(lines[task], place, begin, end)) is not None
        }
        bins.append((end - begin, found))
        begin = end


def _average(lines: Sequence[StepEvent], place: int, begin: int, end: int) -> WorkerTimes | None:
    """Returns the times per step from `begin` to `end`; None if the lines do not cover them."""
    parts: list[tuple[float, WorkerTimes]] = []
    while place < len(lines) and lines[place].step - lines[place].num_steps < end:
        event = lines[place]
        overlap = min(end, event.step) - max(begin, event.step - event.num_steps)
        parts.append((overlap / (end - begin), _times_of(event)))
        place += 1
    if sum(share for share, _ in parts) < _COVERED:
        return None
    return WorkerTimes(
        step_s=sum(share * times.step_s for share, times in parts),
        busy_s=sum(share * times.busy_s for share, times in parts),
        idle_s=_weighted((share, times.idle_s) for share, times in parts),
        input_s=_weighted((share, times.input_s) for share, times in parts),
        peers_s=_weighted((share, times.peers_s) for share, times in parts),
        transfer_s=_weighted((share, times.transfer_s) for share, times in parts),
    )


def _times_of(event: StepEvent) -> WorkerTimes:
    count = event.num_steps
    elapsed_s = max(event.elapsed_s, event.duration_s)
    busy_s = max(0.0, elapsed_s - (event.waited_s or 0.0))
    return WorkerTimes(
        step_s=elapsed_s / count,
        busy_s=busy_s / count,
        idle_s=_per_step(event.idle_s, count),
        input_s=None if event.input_s is None else min(max(0.0, event.input_s), busy_s) / count,
        peers_s=_per_step(event.peers_s, count),
        transfer_s=_per_step(event.transfer_s, count),
    )


def _per_step(time_s: float | None, count: int) -> float | None:
    return None if time_s is None else time_s / count


def _weighted(parts: Iterable[tuple[float, float | None]]) -> float | None:
    total = 0.0
    for share, time_s in parts:
        if time_s is None:
            return None
        total += share * time_s
    return total


def _grouped(
    bins: Sequence[tuple[int, dict[str, WorkerTimes]]], window_s: float
) -> Iterable[Window]:
    """Yields windows of at least `window_s`; the last one may be shorter."""
    group: list[tuple[int, dict[str, WorkerTimes]]] = []
    length_s = 0.0
    for size, times in bins:
        if len(times) < 2:  # no other to wait for
            continue
        group.append((size, times))
        length_s += size * max(one.step_s for one in times.values())
        if length_s >= window_s and sum(size for size, _ in group) >= MIN_STEPS:
            yield _window(group)
            group, length_s = [], 0.0
    if group:
        yield _window(group)


def _window(group: Sequence[tuple[int, dict[str, WorkerTimes]]]) -> Window:
    return Window(bins=tuple(times for _, times in group), sizes=tuple(size for size, _ in group))


# Late workers of a window.


class Cause(enum.Enum):
    """Why a worker is late; the values are shown to users."""

    INPUT = "input"
    COMPUTE = "compute"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """A late worker: the others wait for it for `late_s` of each step of `step_s`.

    The waits for several late workers overlap.
    """

    task: str
    cause: Cause
    late_s: float
    step_s: float

    @property
    def text(self) -> str:
        """A sentence without its full stop.

        Example:
            >>> Straggler(task="worker 3", cause=Cause.INPUT, late_s=0.12, step_s=0.4).text
            'worker 3 is slow in input: the others wait 120 ms of each 400 ms step for it'
        """
        where = {Cause.INPUT: " in input", Cause.COMPUTE: " in computing"}.get(self.cause, "")
        return (
            f"{self.task} is slow{where}: the others wait {_text(self.late_s)} of each "
            f"{_text(self.step_s)} step for it"
        )


def find_stragglers(window: Window) -> tuple[Straggler, ...]:
    """Returns the late workers of a window, the latest first.

    There are none if it is too short, or if the workers run independently.
    """
    present = _present(window)
    is_long = len(present) > 1 and window.num_steps >= MIN_STEPS
    if not is_long or not all(_is_in_step(window, task) for task in present):
        return ()
    step_s = _median(
        [_median([times.step_s for times in one.values()]) for one in window.bins if one]
    )
    of_input = _excess(window, present, lambda times: times.input_s)
    stragglers = [
        Straggler(
            task=task,
            cause=_cause_of(_median(excess), of_input[task]),
            late_s=_median(excess),
            step_s=step_s,
        )
        for task, excess in _excess(window, present, lambda times: times.busy_s).items()
        if _is_significant(excess, step_s) and not _is_idle(window, task, step_s)
    ]
    return tuple(sorted(stragglers, key=lambda one: -one.late_s))


def _text(time_s: float) -> str:
    return f"{1000 * time_s:.0f} ms" if time_s < 1 else f"{time_s:.1f} s"


def _present(window: Window) -> list[str]:
    """Returns the workers with times in most bins."""
    tasks = sorted({task for one in window.bins for task in one}, key=_in_order)
    return [
        task for task in tasks if 2 * sum(task in one for one in window.bins) > len(window.bins)
    ]


def _is_in_step(window: Window, task: str) -> bool:
    """Returns True if a worker's steps take as long as the others': only then does any wait."""
    ratios = [
        one[task].step_s / usual_s
        for one in window.bins
        if task in one and (usual_s := _median([times.step_s for times in one.values()])) > 0
    ]
    return 1 / _MAX_RATIO < _median(ratios) < _MAX_RATIO


def _in_order(task: str) -> tuple[str, int]:
    kind, _, index = task.partition(" ")
    return kind, int(index) if index.isdecimal() else 0


def _is_idle(window: Window, task: str, step_s: float) -> bool:
    """Returns True if a worker waits for its own programs: with less work it would wait longer."""
    idle_s = [one[task].idle_s or 0.0 for one in window.bins if task in one]
    return _median(idle_s) > _IDLE_SHARE * step_s


def _cause_of(late_s: float, of_input: Sequence[float]) -> Cause:
    if not of_input:
        return Cause.UNKNOWN
    return Cause.INPUT if 2 * _median(of_input) >= late_s else Cause.COMPUTE


def _excess(
    window: Window, present: Sequence[str], value: Callable[[WorkerTimes], float | None]
) -> dict[str, list[float]]:
    """Returns by worker, for each bin, its value less the median of the others' in that bin."""
    excess: dict[str, list[float]] = {task: [] for task in present}
    for one in window.bins:
        values = {
            task: number
            for task in present
            if task in one and (number := value(one[task])) is not None
        }
        ordered = sorted(values.values())
        for task, number in values.items():
            if len(ordered) > 1:
                excess[task].append(number - _median_without(ordered, number))
    return excess


def _median_without(ordered: Sequence[float], number: float) -> float:
    """Returns the median of sorted numbers without one of them."""
    place = ordered.index(number)
    count = len(ordered) - 1

    def at(rank: int) -> float:
        return ordered[rank if rank < place else rank + 1]

    return (at((count - 1) // 2) + at(count // 2)) / 2


def _is_significant(excess: Sequence[float], step_s: float) -> bool:
    if not excess:
        return False
    middle = _median(excess)
    deviation = _median([abs(one - middle) for one in excess])
    error = _ERROR_OF_MEDIAN * deviation / math.sqrt(len(excess))
    return middle > max(MIN_SHARE * step_s, _NUM_ERRORS * error)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


# Times of the workers over a whole run.

# Less is what chance adds up to over thousands of windows.
_MIN_SHARE_OF_RUN = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSummary:
    """Median times per step of a worker in a run. None is not measured.

    `slow` has the medians of the windows in which it was late, `num_late_steps` of `num_steps`; it
    is None if the others have waited for it for less than a hundredth of the run.
    """

    task: str
    num_steps: int
    input_s: float | None
    work_s: float
    peers_s: float | None
    transfer_s: float | None
    slow: Straggler | None
    num_late_steps: int


def summaries_of(windows: Sequence[Window], whole_s: float) -> tuple[WorkerSummary, ...]:
    """Sums up the windows of a run of `whole_s`; empty without steps of several workers."""
    late: dict[str, list[tuple[int, Straggler]]] = {}
    for window in windows:
        for one in find_stragglers(window):
            late.setdefault(one.task, []).append((window.num_steps, one))
    tasks = {task for window in windows for one in window.bins for task in one}
    if len(tasks) < 2:
        return ()
    return tuple(
        _summary(task, windows, late.get(task, ()), whole_s)
        for task in sorted(tasks, key=_in_order)
    )


def _summary(
    task: str,
    windows: Iterable[Window],
    late: Sequence[tuple[int, Straggler]],
    whole_s: float,
) -> WorkerSummary:
    own = [
        (size, one[task])
        for window in windows
        for size, one in zip(window.sizes, window.bins, strict=True)
        if task in one
    ]

    def median(field: str) -> float | None:
        found = [getattr(times, field) for _, times in own]
        found = [time_s for time_s in found if time_s is not None]
        return statistics.median(found) if found else None

    slow = None
    if sum(size * one.late_s for size, one in late) > _MIN_SHARE_OF_RUN * whole_s:
        slow = Straggler(
            task=task,
            cause=statistics.mode(one.cause for _, one in late),
            late_s=_median([one.late_s for _, one in late]),
            step_s=_median([one.step_s for _, one in late]),
        )
    return WorkerSummary(
        task=task,
        num_steps=sum(size for size, _ in own),
        input_s=median("input_s"),
        work_s=_median([times.busy_s - (times.input_s or 0.0) for _, times in own]),
        peers_s=median("peers_s"),
        transfer_s=median("transfer_s"),
        slow=slow,
        num_late_steps=sum(size for size, _ in late) if slow else 0,
    )

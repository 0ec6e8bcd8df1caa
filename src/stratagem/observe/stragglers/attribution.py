"""The workers for which the others wait, from the step times of a few seconds.

In lockstep all steps take the same time. What differs is the time in which a worker does its own
work: it reads its data, computes, and waits for no other. A worker is late if that time exceeds the
median of the others' in most bins of a window. It is slow in its input if most of the excess is a
wait for data, and otherwise in computing.

A slow link leaves all workers equally busy, and the exchange takes longer for all of them. But only
the values that pass over it arrive slowly. So a worker has a slow link if they take longer between
it and most others than between the others.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from stratagem.observe.stragglers.windows import MIN_STEPS, Window, WorkerTimes

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
# Of two workers, none is slower than the pair's only link.
_MIN_WORKERS_OF_LINKS = 3


class Cause(enum.Enum):
    """Why a worker is late; the values are shown to users."""

    INPUT = "input"
    COMPUTE = "compute"
    LINK = "link"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Straggler:
    """A late worker. `late_s` is the time per step that another worker waits for it, on average."""

    task: str
    cause: Cause
    late_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assessment:
    """Late workers of a window, the one that costs most first, and the time of a step."""

    stragglers: tuple[Straggler, ...]
    step_s: float
    num_steps: int
    tasks: tuple[str, ...]


def find_stragglers(window: Window) -> Assessment:
    """Returns the late workers of a window; none if it is too short, or they run independently."""
    present = _present(window)
    step_s = _median(
        [_median([times.step_s for times in one.values()]) for one in window.bins if one]
    )
    late: dict[str, dict[Cause, float]] = {}
    is_long = len(present) > 1 and window.num_steps >= MIN_STEPS
    if is_long and all(_is_in_step(window, task) for task in present):
        busy = _waits_for_busy(window, present, step_s)
        for task, (cause, late_s) in busy.items():
            late.setdefault(task, {})[cause] = late_s
        for task, late_s in _waits_for_links(window, present, step_s).items():
            late.setdefault(task, {})[Cause.LINK] = late_s
    stragglers = [
        Straggler(
            task=task, cause=max(by_cause, key=by_cause.__getitem__), late_s=sum(by_cause.values())
        )
        for task, by_cause in late.items()
    ]
    return Assessment(
        stragglers=tuple(sorted(stragglers, key=lambda one: -one.late_s)),
        step_s=step_s,
        num_steps=window.num_steps,
        tasks=tuple(present),
    )


def sentence(task: str, cause: Cause, late_s: float, step_s: float) -> str:
    """Describes a late worker.

    Example:
        >>> sentence("worker 3", Cause.INPUT, 0.12, 0.4)
        'worker 3 is slow in input: the others wait 120 ms of each 400 ms step for it'
    """
    where = {Cause.INPUT: " in input", Cause.COMPUTE: " in computing", Cause.LINK: " by its link"}
    return (
        f"{task} is slow{where.get(cause, '')}: the others wait {_text(late_s)} of each "
        f"{_text(step_s)} step for it"
    )


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


def _waits_for_busy(
    window: Window, present: Sequence[str], step_s: float
) -> dict[str, tuple[Cause, float]]:
    """Returns the cause and the time waited for each worker whose own work takes longer."""
    excess = _excess(window, present, lambda times: times.busy_s)
    of_input = _excess(window, present, lambda times: times.input_s)
    late = [
        task
        for task in present
        if _is_significant(excess[task], step_s) and not _is_idle(window, task, step_s)
    ]
    busy_s = {
        task: _median([one[task].busy_s for one in window.bins if task in one]) for task in present
    }
    waited_s = _divided_waits(busy_s, late)
    return {
        task: (_cause_of(_median(excess[task]), of_input[task]), waited_s[task])
        for task in late
        if waited_s[task] > 0
    }


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


def _divided_waits(busy_s: Mapping[str, float], late: Iterable[str]) -> dict[str, float]:
    """Divides the time that workers wait among the late ones; returns it per other worker.

    While several late workers are still busy, each of them has an equal part in the others' wait.
    That is their Shapley value, so the parts add up to the whole wait.

    Source: Littlechild and Owen, A simple expression for the Shapley value in a special case, 1973.
    """
    ordered = sorted(late, key=busy_s.__getitem__)
    others = [time_s for task, time_s in busy_s.items() if task not in ordered]
    reached_s = max(others, default=0.0)
    part_s, parts_s = 0.0, {}
    for rank, task in enumerate(ordered):
        num_busy = len(ordered) - rank
        step_s = max(0.0, busy_s[task] - reached_s)
        part_s += step_s * (len(busy_s) - num_busy) / num_busy
        reached_s = max(reached_s, busy_s[task])
        parts_s[task] = part_s / (len(busy_s) - 1)
    return parts_s


def _waits_for_links(window: Window, present: Sequence[str], step_s: float) -> dict[str, float]:
    """Returns the time that a slow link adds to each exchange, by the worker that has it."""
    series: dict[str, list[float]] = {task: [] for task in present}
    for one in window.bins:
        received = {
            task: one[task].received_s or {}
            for task in present
            if task in one and one[task].received_s is not None
        }
        if len(received) < _MIN_WORKERS_OF_LINKS:
            continue
        of_task = {task: _transit_s(task, received) for task in received}
        ordered = sorted(of_task.values())
        for task, time_s in of_task.items():
            series[task].append(time_s - _median_without(ordered, time_s))
    return {
        task: _median(excess) for task, excess in series.items() if _is_significant(excess, step_s)
    }


def _transit_s(task: str, received: Mapping[str, Mapping[str, float]]) -> float:
    """Returns the time that values take between a worker and the others, in the usual direction.

    The lower median: of a worker with two others, one of which has a slow link, it is the time of
    the good one.
    """
    times_s = [
        max(received[task].get(other) or 0.0, received[other].get(task) or 0.0)
        for other in received
        if other != task
    ]
    return statistics.median_low(times_s)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


# Cost of slow workers over a whole run.

_MIN_SHARE_OF_RUN = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerCost:
    """Mean times per step of a worker, and what the others have waited for it. None is unknown.

    `waited_s` is the time that each other worker has waited for it, on average, and `replica_s` the
    sum over all of them. `num_late_steps` of `num_steps` were in windows in which it was late, and
    `late_s` is the wait in each of those, which take `late_step_s`. `cause` is None if it is not
    slow.
    """

    task: str
    num_steps: int
    step_s: float
    input_s: float | None
    work_s: float
    peers_s: float | None
    transfer_s: float | None
    cause: Cause | None
    num_late_steps: int
    late_s: float
    late_step_s: float
    waited_s: float
    replica_s: float
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of slow workers in a run."""

    workers: tuple[WorkerCost, ...]

    @property
    def slow(self) -> tuple[WorkerCost, ...]:
        """The slow workers, the most expensive first."""
        found = [worker for worker in self.workers if worker.cause is not None]
        return tuple(sorted(found, key=lambda worker: -worker.waited_s))


@dataclasses.dataclass
class _Waits:
    """Waits for a worker in some windows: the steps, their time, and the waits by cause."""

    num_steps: int = 0
    steps_s: float = 0.0
    replica_s: float = 0.0
    by_cause: dict[Cause, float] = dataclasses.field(default_factory=dict)

    @property
    def waited_s(self) -> float:
        return sum(self.by_cause.values())


def cost_of(windows: Sequence[Window], whole_s: float) -> RunCost | None:
    """Sums up the windows of a run of `whole_s`; None without steps of several workers.

    A worker is slow if the others have waited for it for more than a hundredth of the run: less is
    what chance adds up to over thousands of windows.
    """
    waits: dict[str, _Waits] = {}
    for window in windows:
        _add(waits, find_stragglers(window))
    tasks = dict.fromkeys(task for window in windows for one in window.bins for task in one)
    if len(tasks) < 2:
        return None
    workers = [_worker(task, windows, waits.get(task, _Waits()), whole_s) for task in tasks]
    return RunCost(workers=tuple(sorted(workers, key=lambda worker: _number(worker.task))))


def _add(waits: dict[str, _Waits], assessment: Assessment) -> None:
    for straggler in assessment.stragglers:
        own = waits.setdefault(straggler.task, _Waits())
        waited_s = straggler.late_s * assessment.num_steps
        own.num_steps += assessment.num_steps
        own.steps_s += assessment.step_s * assessment.num_steps
        own.replica_s += waited_s * (len(assessment.tasks) - 1)
        own.by_cause[straggler.cause] = own.by_cause.get(straggler.cause, 0.0) + waited_s


def _worker(task: str, windows: Iterable[Window], waits: _Waits, whole_s: float) -> WorkerCost:
    own = [
        (size, one[task])
        for window in windows
        for size, one in zip(window.sizes, window.bins, strict=True)
        if task in one
    ]
    share = waits.waited_s / whole_s if whole_s > 0 else 0.0
    is_slow = share > _MIN_SHARE_OF_RUN
    busy_s, input_s = _mean(own, "busy_s"), _mean(own, "input_s")
    return WorkerCost(
        task=task,
        num_steps=sum(size for size, _ in own),
        step_s=_mean(own, "step_s") or 0.0,
        input_s=input_s,
        work_s=max(0.0, (busy_s or 0.0) - (input_s or 0.0)),
        peers_s=_mean(own, "peers_s"),
        transfer_s=_mean(own, "transfer_s"),
        cause=max(waits.by_cause, key=waits.by_cause.__getitem__) if is_slow else None,
        num_late_steps=waits.num_steps if is_slow else 0,
        late_s=waits.waited_s / waits.num_steps if is_slow else 0.0,
        late_step_s=waits.steps_s / waits.num_steps if is_slow else 0.0,
        waited_s=waits.waited_s if is_slow else 0.0,
        replica_s=waits.replica_s if is_slow else 0.0,
        share=share if is_slow else 0.0,
    )


def _mean(own: Sequence[tuple[int, WorkerTimes]], field: str) -> float | None:
    """Returns the mean over the steps in which it was measured."""
    found = [(size, getattr(times, field)) for size, times in own]
    found = [(size, time_s) for size, time_s in found if time_s is not None]
    count = sum(size for size, _ in found)
    return sum(size * time_s for size, time_s in found) / count if count else None


def _number(task: str) -> tuple[str, int]:
    kind, _, index = task.partition(" ")
    return kind, int(index) if index.isdecimal() else 0

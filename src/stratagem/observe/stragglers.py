"""The workers for which the others wait, from the medians of their step times.

In lockstep all steps take the same time. What differs is the time in which a worker does its own
work: it reads its data, computes, and waits for no other. A worker is late if the median of that
time over ten seconds exceeds the median of the others'. It is slow in its input if most of the
excess is a wait for data, and otherwise in computing. Does not import JAX.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

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
MIN_STEPS = 5
"""Steps of a window; the time of fewer may be a pause of a machine."""
WINDOW_S = 10.0
"""Length of a window: ten lines, enough for a median, and short beside any reaction to it."""
# An excess must also exceed the standard error of its median by this factor, which chance does once
# in a thousand windows of equal workers.
_NUM_ERRORS = 3.0
# Standard error of a median of normal values, in median absolute deviations of one value.
_ERROR_OF_MEDIAN = 1.2533 * 1.4826
# Steps of workers in lockstep take equally long, but for pauses that only some of them count.
_MAX_RATIO = 1.25
# A host that waits this much of a step for programs beside it does not hold up the others.
_IDLE_SHARE = 0.05
# Waits for a worker of less than this share of a run are what chance adds up to over thousands of
# windows.
_MIN_SHARE_OF_RUN = 0.01

Line: TypeAlias = tuple[str, float, StepEvent]
"""A line of steps with its task, and the time on the run's clock at which it was written."""


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
    """Medians per step of one worker, over its lines, and the mean step. None is not measured.

    `busy_s` is its own work, with the standard error `error_s`, and `input_s` of it is the wait for
    its own data. `idle_s` is the wait for programs that run beside the host, which may be computing
    or waiting. `peers_s` is the known wait for other workers, and `transfer_s` the time of sending
    and receiving.
    """

    num_steps: int
    step_s: float
    busy_s: float
    mean_s: float = 0.0
    error_s: float = 0.0
    idle_s: float | None = None
    input_s: float | None = None
    peers_s: float | None = None
    transfer_s: float | None = None


def times_of(lines: Iterable[Line]) -> dict[str, WorkerTimes]:
    """Returns the times of each worker, by task in order. Lines without waits are left out."""
    by_task: dict[str, list[StepEvent]] = {}
    for task, _, event in lines:
        if event.waited_s is not None and event.num_steps > 0:
            by_task.setdefault(task, []).append(event)
    return {task: _times(by_task[task]) for task in sorted(by_task, key=_in_order)}


def _times(events: Sequence[StepEvent]) -> WorkerTimes:
    busy_s = [max(0.0, elapsed_s(one) - (one.waited_s or 0.0)) / one.num_steps for one in events]
    middle_s = statistics.median(busy_s)
    deviation_s = statistics.median(abs(one - middle_s) for one in busy_s)

    def median(field: str) -> float | None:
        found = [(getattr(one, field), one.num_steps) for one in events]
        measured = [time_s / count for time_s, count in found if time_s is not None]
        return statistics.median(measured) if measured else None

    input_s = median("input_s")
    return WorkerTimes(
        num_steps=sum(one.num_steps for one in events),
        step_s=statistics.median(elapsed_s(one) / one.num_steps for one in events),
        busy_s=middle_s,
        mean_s=sum(map(elapsed_s, events)) / sum(one.num_steps for one in events),
        error_s=_ERROR_OF_MEDIAN * deviation_s / math.sqrt(len(events)),
        idle_s=median("idle_s"),
        input_s=None if input_s is None else min(max(0.0, input_s), middle_s),
        peers_s=median("peers_s"),
        transfer_s=median("transfer_s"),
    )


def elapsed_s(event: StepEvent) -> float:
    """Returns the time of a line of steps, with the gaps between them."""
    return max(event.elapsed_s, event.duration_s)


def _in_order(task: str) -> tuple[str, int]:
    kind, _, index = task.partition(" ")
    return kind, int(index) if index.isdecimal() else 0


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


def find_stragglers(times: Mapping[str, WorkerTimes]) -> tuple[Straggler, ...]:
    """Returns the late workers of a window, the latest first.

    There are none if it is too short, or if the workers run independently.
    """
    most = max((one.num_steps for one in times.values()), default=0)
    # A worker that came or left in the window was not waited for in most of it.
    present = {task: one for task, one in times.items() if 2 * one.num_steps > most}
    if len(present) < 2 or most < MIN_STEPS:
        return ()
    step_s = statistics.median(one.step_s for one in present.values())
    # Only workers whose steps take equally long wait for each other. Pauses change the medians of
    # lines that hold other steps, and the means where a pause is in the next line of some.
    steps_s = [one.step_s for one in present.values()]
    if not (_are_equal(steps_s) or _are_equal([one.mean_s for one in present.values()])):
        return ()
    found: list[Straggler] = []
    for task, own in present.items():
        others = [one for name, one in present.items() if name != task]
        late_s = own.busy_s - statistics.median(one.busy_s for one in others)
        # A median of several workers is as much surer than that of one.
        others_error_s = statistics.median(one.error_s for one in others) / math.sqrt(len(others))
        error_s = math.hypot(own.error_s, others_error_s)
        is_late = late_s > max(MIN_SHARE * step_s, _NUM_ERRORS * error_s)
        # One that waits for its own programs would wait longer with less work.
        if is_late and (own.idle_s or 0.0) <= _IDLE_SHARE * step_s:
            cause = _cause_of(late_s, own, others)
            found.append(Straggler(task=task, cause=cause, late_s=late_s, step_s=step_s))
    return tuple(sorted(found, key=lambda one: -one.late_s))


def _are_equal(times_s: Sequence[float]) -> bool:
    middle_s = statistics.median(times_s)
    return all(middle_s / _MAX_RATIO < one_s < middle_s * _MAX_RATIO for one_s in times_s)


def _cause_of(late_s: float, own: WorkerTimes, others: Iterable[WorkerTimes]) -> Cause:
    inputs_s = [one.input_s for one in others if one.input_s is not None]
    if own.input_s is None or not inputs_s:
        return Cause.UNKNOWN
    of_input_s = own.input_s - statistics.median(inputs_s)
    return Cause.INPUT if 2 * of_input_s >= late_s else Cause.COMPUTE


def _text(time_s: float) -> str:
    return f"{1000 * time_s:.0f} ms" if time_s < 1 else f"{time_s:.1f} s"


# Times of the workers over a whole run.


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSummary:
    """Times of a worker in a run.

    `slow` has the medians of the windows in which it was late, `num_late_steps` of its steps; it is
    None if the others have waited for it for less than a hundredth of the run.
    """

    task: str
    times: WorkerTimes
    slow: Straggler | None
    num_late_steps: int


def summaries_of(processes: Iterable[ProcessEvents], whole_s: float) -> tuple[WorkerSummary, ...]:
    """Sums up a run of `whole_s`; empty without measured steps of several workers."""
    settled = SettledLines()
    lines = [line for process in processes for line in settled.pick(process)]
    times = times_of(lines)
    if len(times) < 2:
        return ()
    late: dict[str, list[tuple[int, Straggler]]] = {task: [] for task in times}
    for window in _windows(lines):
        in_window = times_of(window)
        for one in find_stragglers(in_window):
            late[one.task].append((in_window[one.task].num_steps, one))
    return tuple(_summary(task, times[task], late[task], whole_s) for task in times)


def _windows(lines: Iterable[Line]) -> Iterable[list[Line]]:
    """Yields lines of at least ten seconds and five steps each; the last ones may be fewer."""
    window: list[Line] = []
    num_steps: dict[str, int] = {}
    for line in sorted(lines, key=lambda one: one[1]):
        task, at_s, event = line
        if window and at_s - window[0][1] >= WINDOW_S and max(num_steps.values()) >= MIN_STEPS:
            yield window
            window, num_steps = [], {}
        window.append(line)
        num_steps[task] = num_steps.get(task, 0) + event.num_steps
    yield window


def _summary(
    task: str, times: WorkerTimes, late: Sequence[tuple[int, Straggler]], whole_s: float
) -> WorkerSummary:
    slow = None
    if sum(count * one.late_s for count, one in late) > _MIN_SHARE_OF_RUN * whole_s:
        slow = Straggler(
            task=task,
            cause=statistics.mode(one.cause for _, one in late),
            late_s=statistics.median(one.late_s for _, one in late),
            step_s=statistics.median(one.step_s for _, one in late),
        )
    num_late_steps = sum(count for count, _ in late) if slow else 0
    return WorkerSummary(task=task, times=times, slow=slow, num_late_steps=num_late_steps)

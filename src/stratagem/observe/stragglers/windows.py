"""Step times of several workers, aligned by step number.

Workers in lockstep count the same steps, but each writes its lines at moments of its own. A bin is
a line of one worker; the others' lines are averaged over the same steps. So clocks of different
machines need not agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from stratagem.observe.run_events.records import StepEvent

MIN_STEPS = 5
"""Steps of a window; the time of fewer may be a pause of a machine."""
WINDOW_S = 10.0
"""Length of a window: ten lines, enough for a median, and short beside any reaction to it."""
# Rounding, in the share of a bin's steps that a worker's lines must cover.
_COVERED = 0.999


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """Seconds per step of one worker. None is not measured.

    `busy_s` is its own work, of which `input_s` is the wait for its own data. `idle_s` is the wait
    for programs that run beside the host, which may be computing or waiting. `peers_s` is the
    known wait for other workers, `transfer_s` the time of sending and receiving, and `received_s`
    that of receiving from each worker.
    """

    step_s: float
    busy_s: float
    idle_s: float | None = None
    input_s: float | None = None
    peers_s: float | None = None
    transfer_s: float | None = None
    received_s: Mapping[str, float] | None = None


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
        received_s=_received(parts),
    )


def _times_of(event: StepEvent) -> WorkerTimes:
    count = event.num_steps
    elapsed_s = max(event.elapsed_s, event.duration_s)
    busy_s = max(0.0, elapsed_s - (event.waited_s or 0.0))
    received_s = event.received_s
    return WorkerTimes(
        step_s=elapsed_s / count,
        busy_s=busy_s / count,
        idle_s=_per_step(event.idle_s, count),
        input_s=None if event.input_s is None else min(max(0.0, event.input_s), busy_s) / count,
        peers_s=_per_step(event.peers_s, count),
        transfer_s=_per_step(event.transfer_s, count),
        received_s=None
        if received_s is None
        else {task: time_s / count for task, time_s in received_s.items()},
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


def _received(parts: Sequence[tuple[float, WorkerTimes]]) -> dict[str, float] | None:
    totals: dict[str, float] = {}
    for share, times in parts:
        if times.received_s is None:
            return None
        for task, time_s in times.received_s.items():
            totals[task] = totals.get(task, 0.0) + share * time_s
    return totals


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

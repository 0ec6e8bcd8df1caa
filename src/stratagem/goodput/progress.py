"""What each process did when, from its events."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from stratagem.goodput.events import (
    FailureEvent,
    RestoredEvent,
    SaveEndedEvent,
    SaveStartedEvent,
    StepEvent,
)
from stratagem.goodput.reading import ProcessEvents

__all__ = ["History", "Life", "Limits", "Position", "Stall", "StepTimes", "Stretch", "history_of"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps in a row of one process.

    Args:
        begin_s: when the first began.
        end_s: when the last was done.
        step: the number of the last.
        num_steps: how many.
        share: which part of the time the steps took.
        keeping_share: which part of it keeping the state in memory took.
        is_first: these are the first steps of a life, whose time counts as starting.
    """

    begin_s: float
    end_s: float
    step: int
    num_steps: int
    share: float
    keeping_share: float
    is_first: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """Where a life begins: what was done before, of later steps, is done again.

    Args:
        at_s: the begin of the life.
        step: how many steps its state has seen.
    """

    at_s: float
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stall:
    """Training waited for a checkpoint.

    Args:
        begin_s: from when on.
        end_s: until when.
        failed: the checkpoint was not written.
    """

    begin_s: float
    end_s: float
    failed: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Life:
    """From a start, a restored state or a failure to the first step after it.

    Args:
        begin_s: from when on.
        end_s: until when; the last event of the process where no step was done.
        is_start: it begins with the start of the process.
    """

    begin_s: float
    end_s: float
    is_start: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """What one process did.

    Args:
        stretches: its steps, in their order.
        positions: where its lives begin.
        stalls: for which checkpoints it waited.
        lives: how it began to train, each time.
    """

    stretches: tuple[Stretch, ...]
    positions: tuple[Position, ...]
    stalls: tuple[Stall, ...]
    lives: tuple[Life, ...]


def history_of(process: ProcessEvents) -> History:
    """Says what a process did.

    Args:
        process: its events.

    Returns:
        Its steps, its saves and its lives.
    """
    stalls = _stalls(process)
    stalled = _Stalled(stalls)
    stretches: list[Stretch] = []
    positions: list[Position] = []
    lives: list[Life] = []
    begin_s, is_start, restored_step, has_steps = process.at_s(process.start), True, None, False
    for event in process.events:
        at_s = process.at_s(event)
        if isinstance(event, StepEvent):
            stretches.append(_stretch(event, at_s, stalled, is_first=not has_steps))
            if not has_steps:
                step = event.step - event.num_steps if restored_step is None else restored_step
                positions.append(Position(at_s=begin_s, step=step))
                lives.append(Life(begin_s=begin_s, end_s=at_s, is_start=is_start))
            has_steps = True
        elif isinstance(event, RestoredEvent | FailureEvent):
            if has_steps:
                begin_s, is_start, restored_step, has_steps = at_s, False, None, False
            if isinstance(event, RestoredEvent):
                restored_step = event.step
    if not has_steps:
        end_s = process.at_s(process.events[-1])
        lives.append(Life(begin_s=begin_s, end_s=end_s, is_start=is_start))
        if restored_step is not None:
            positions.append(Position(at_s=begin_s, step=restored_step))
    return History(
        stretches=tuple(stretches),
        positions=tuple(positions),
        stalls=tuple(stalls),
        lives=tuple(lives),
    )


def _stretch(event: StepEvent, at_s: float, stalled: _Stalled, *, is_first: bool) -> Stretch:
    begin_s = at_s - max(0.0, event.elapsed_s)
    net_s = at_s - begin_s - stalled.between_s(begin_s, at_s)
    share = min(1.0, max(0.0, event.duration_s) / net_s) if net_s > 0 else 1.0
    keeping_share = min(1.0 - share, max(0.0, event.keeping_s) / net_s) if net_s > 0 else 0.0
    return Stretch(
        begin_s=begin_s,
        end_s=at_s,
        step=event.step,
        num_steps=max(1, event.num_steps),
        share=share,
        keeping_share=keeping_share,
        is_first=is_first,
    )


class _Stalled:
    """How long a process waited for its checkpoints, looked up by time."""

    def __init__(self, stalls: Iterable[Stall]) -> None:
        self._stalls = sorted(stalls, key=lambda stall: stall.begin_s)
        ends_s = (stall.end_s for stall in self._stalls)
        self._latest_ends_s = list(itertools.accumulate(ends_s, max))

    def between_s(self, begin_s: float, end_s: float) -> float:
        total_s = 0.0
        first = bisect.bisect_right(self._latest_ends_s, begin_s)
        for place in range(first, len(self._stalls)):
            stall = self._stalls[place]
            if stall.begin_s >= end_s:
                break
            total_s += max(0.0, min(stall.end_s, end_s) - max(stall.begin_s, begin_s))
        return total_s


def _stalls(process: ProcessEvents) -> list[Stall]:
    started_s: dict[int, float] = {}
    stalls: list[Stall] = []
    for event in process.events:
        if isinstance(event, SaveStartedEvent):
            started_s[event.step] = process.at_s(event)
        elif isinstance(event, SaveEndedEvent):
            end_s = process.at_s(event)
            begin_s = started_s.pop(event.step, end_s - max(0.0, event.duration_s))
            stall_s = min(max(0.0, event.stall_s), end_s - begin_s)
            failed = event.failed is not None
            stalls.append(Stall(begin_s=begin_s, end_s=begin_s + stall_s, failed=failed))
    return stalls


class Limits:
    """Up to which step the steps of a moment were kept.

    Args:
        positions: where all lives of the group begin.
    """

    def __init__(self, positions: Iterable[Position]) -> None:
        ordered = sorted(positions, key=lambda position: position.at_s)
        self._times_s = [position.at_s for position in ordered]
        self._lowest = [position.step for position in ordered]
        for place in range(len(ordered) - 2, -1, -1):
            self._lowest[place] = min(self._lowest[place], self._lowest[place + 1])

    def num_kept(self, stretch: Stretch) -> int:
        """Says how many of the steps of a stretch were not done again.

        Args:
            stretch: the steps.

        Returns:
            How many, from the first on.
        """
        place = bisect.bisect_left(self._times_s, stretch.end_s)
        if place == len(self._lowest):
            return stretch.num_steps
        behind = max(0, stretch.step - self._lowest[place])
        return max(0, stretch.num_steps - behind)


class StepTimes:
    """When the group has done a step; within a stretch they are taken as evenly spread.

    Args:
        stretches: of all processes.
    """

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._stretches = sorted(stretches, key=lambda stretch: stretch.end_s)
        self._ends_s = [stretch.end_s for stretch in self._stretches]
        self._longest_s = max(
            (stretch.end_s - stretch.begin_s for stretch in self._stretches), default=0.0
        )

    def last_s(self, time_s: float) -> float | None:
        """Says when a step was done last.

        Args:
            time_s: at this time or before.

        Returns:
            The time; None if none was done.
        """
        place = bisect.bisect_right(self._ends_s, time_s)
        before = [self._ends_s[place - 1]] if place else []
        for stretch in self._reaching(time_s, place):
            if stretch.begin_s < time_s:
                spacing_s, num_done = _spacing(stretch, time_s)
                if num_done >= 1:
                    before.append(stretch.begin_s + num_done * spacing_s)
        return max(before, default=None)

    def next_s(self, time_s: float) -> float | None:
        """Says when a step was done next.

        Args:
            time_s: after this time.

        Returns:
            The time; None if none was done.
        """
        place = bisect.bisect_right(self._ends_s, time_s)
        after = [self._ends_s[place]] if place < len(self._ends_s) else []
        for stretch in self._reaching(time_s, place):
            spacing_s, num_done = _spacing(stretch, max(time_s, stretch.begin_s))
            after.append(min(stretch.end_s, stretch.begin_s + (num_done + 1) * spacing_s))
        return min(after, default=None)

    def _reaching(self, time_s: float, place: int) -> Sequence[Stretch]:
        """Those that end later and may have begun before; a life's first steps end together."""
        last = bisect.bisect_right(self._ends_s, time_s + self._longest_s)
        candidates = self._stretches[place : last + 1]
        return [one for one in candidates if one.begin_s < one.end_s and not one.is_first]


def _spacing(stretch: Stretch, time_s: float) -> tuple[float, int]:
    spacing_s = (stretch.end_s - stretch.begin_s) / stretch.num_steps
    return spacing_s, int((time_s - stretch.begin_s) / spacing_s)

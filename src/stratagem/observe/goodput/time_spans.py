"""Spans of a run's wall time, each with the cause that counts in it."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

from stratagem.observe.goodput.failures import Failure
from stratagem.observe.goodput.history import (
    CheckpointStall,
    History,
    RetainedSteps,
    Startup,
    StepInterval,
)
from stratagem.observe.goodput.membership import MemberChange

CAUSES = (
    "useful",
    "repeated",
    "members lost",
    "members joined",
    "detecting",
    "restarting",
    "saving",
    "starting",
    "waiting",
)

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

    Example:
        >>> span = sg.goodput.Span(begin_s=10.0, end_s=12.5, cause="saving")
        >>> span.cause in sg.goodput.CAUSES, span.end_s - span.begin_s
        (True, 2.5)

    Source: specific to Stratagem.
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
    intervals = [interval for history in histories for interval in history.intervals]
    stalls = [stall for history in histories for stall in history.stalls]
    layers = [*_step_layers(intervals, retained), *_stall_layers(stalls)]
    layers += [*_startup_layers(histories, is_elastic=bool(changes)), *_member_layers(changes)]
    layers += [*_failure_layers(failures, end_s), _Layer(begin_s, first_start_s, _STARTING)]
    return tuple(_merged_spans(layers, begin_s, end_s))


@dataclasses.dataclass(frozen=True)
class _Layer:
    begin_s: float
    end_s: float
    rank: int
    share: float = 1.0
    snapshot_share: float = 0.0


def _step_layers(intervals: Iterable[StepInterval], retained: RetainedSteps) -> Iterator[_Layer]:
    for interval in intervals:
        if not interval.is_first:
            part = retained.num_useful(interval) / interval.num_steps
            middle_s = interval.begin_s + part * (interval.end_s - interval.begin_s)
            shares = (interval.share, interval.snapshot_share)
            yield _Layer(interval.begin_s, middle_s, _KEPT, *shares)
            yield _Layer(middle_s, interval.end_s, _REPEATED, *shares)


def _stall_layers(stalls: Iterable[CheckpointStall]) -> Iterator[_Layer]:
    for stall in stalls:
        yield _Layer(stall.begin_s, stall.end_s, _NOT_SAVED if stall.failed else _SAVED)


def _startup_layers(histories: Sequence[History], *, is_elastic: bool) -> Iterator[_Layer]:
    """Yields the startups of the run; a process that starts while others train is none."""
    training = _TrainingTimes(histories) if is_elastic else None
    for history in histories:
        for startup in history.startups:
            if training is None or not training.has_steps_in(startup):
                rank = _STARTING if startup.is_start else _RESTARTING
                yield _Layer(startup.begin_s, startup.end_s, rank)


class _TrainingTimes:
    """Finds steps, except first ones, within an interval."""

    def __init__(self, histories: Iterable[History]) -> None:
        ordered = sorted(
            (interval.begin_s, interval.end_s)
            for history in histories
            for interval in history.intervals
            if not interval.is_first
        )
        self._begins_s = [begin_s for begin_s, _ in ordered]
        ends_s = (end_s for _, end_s in reversed(ordered))
        self._earliest_ends_s = list(itertools.accumulate(ends_s, min))[::-1]

    def has_steps_in(self, startup: Startup) -> bool:
        """Returns True if steps began and ended in it."""
        index = bisect.bisect_left(self._begins_s, startup.begin_s)
        ends_s = self._earliest_ends_s[index : index + 1]
        return any(end_s <= startup.end_s for end_s in ends_s)


def _member_layers(changes: Iterable[MemberChange]) -> Iterator[_Layer]:
    for change in changes:
        if change.pause_s is not None:
            rank = _JOINED if change.cause == _CAUSE_OF[_JOINED] else _LOST
            yield _Layer(change.at_s, change.at_s + change.pause_s, rank)


def _failure_layers(failures: Iterable[Failure], end_s: float) -> Iterator[_Layer]:
    for failure in failures:
        if failure.sign_of_life_s is not None:
            yield _Layer(failure.sign_of_life_s, failure.told_s, _DETECTING)
        resumed_s = end_s if failure.resumed_s is None else failure.resumed_s
        yield _Layer(failure.told_s, resumed_s, _RESTARTING)


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

"""Accounts for the time of a run: what was useful, and what was lost to which cause."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from stratagem.goodput.events import EndEvent
from stratagem.goodput.failures import Failure, failures_of
from stratagem.goodput.progress import History, Limits, Stall, StepTimes, Stretch, history_of
from stratagem.goodput.reading import ProcessEvents, RunEvents

__all__ = ["Account", "CAUSES", "Span", "account_for"]

CAUSES = ("useful", "repeated", "detecting", "restarting", "saving", "starting", "waiting")

# What counts where several are true at one time: the first of these.
_SAVED, _KEPT, _REPEATED, _DETECTING, _RESTARTING, _NOT_SAVED, _STARTING, _WAITING = range(8)
_CAUSE_OF = {
    _SAVED: "saving",
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
    """A part of the time with one cause.

    Args:
        begin_s: from when on, after the begin of the run.
        end_s: until when.
        cause: one of `CAUSES`.
    """

    begin_s: float
    end_s: float
    cause: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Account:
    """Where the time of a run went.

    Args:
        begin_s: the first start, on the clock of `time.time`.
        whole_s: from there to the last event.
        time_s: how much of it was useful, and how much was lost to each cause.
        spans: the same, one after the other.
        num_steps: how many steps were kept.
        num_repeated: how many were done again, counted once for each time.
        failures: their times are after the begin.
        is_over: every process that trained last has told of its end.
        num_processes: how many files of events there were.
        problems: what could not be read.
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

    @property
    def goodput(self) -> float:
        """The useful part of the whole; 0 where there is no time."""
        return self.time_s["useful"] / self.whole_s if self.whole_s > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Returns everything but the spans, for JSON.

        Returns:
            Numbers, texts, and lists and dictionaries of them.
        """
        detect_s = [one.detect_s for one in self.failures if one.detect_s is not None]
        resume_s = [one.resume_s for one in self.failures if one.resume_s is not None]
        return {
            "goodput": self.goodput,
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
                {
                    "told_s": failure.told_s,
                    "what": failure.what,
                    "detect_s": failure.detect_s,
                    "resume_s": failure.resume_s,
                    "silence_s": failure.silence_s,
                }
                for failure in self.failures
            ],
            "problems": list(self.problems),
        }


def account_for(run: RunEvents) -> Account:
    """Accounts for the time from the first start to the last event.

    The tasks that train are a group in lockstep: a step counts once, however many processes did
    it. docs/goodput.md defines each cause.

    Args:
        run: the events.

    Returns:
        The account; its parts sum to the whole.

    Example:
        >>> import tempfile
        >>> from stratagem.goodput import EventWriter, read_run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with EventWriter(folder, "worker", 0, num_processes=1) as writer:
        ...         writer.step(1)
        ...         writer.end()
        ...     account = account_for(read_run(folder))
        >>> account.num_steps, account.failures, account.is_over
        (1, (), True)
    """
    group = [one for one in run.processes if one.trains or one.start.task_type == "launcher"]
    trainers = [one for one in group if one.trains]
    histories = [history_of(process) for process in trainers]
    stretches = [stretch for history in histories for stretch in history.stretches]
    stalls = [stall for history in histories for stall in history.stalls]
    limits = Limits(position for history in histories for position in history.positions)
    failures = failures_of(group, StepTimes(stretches), stalls)
    times_s = [process.at_s(event) for process in group for event in process.events]
    begin_s = min((process.at_s(process.start) for process in group), default=0.0)
    end_s = max(times_s, default=begin_s)
    layers = [
        *_of_steps(stretches, limits),
        *_of_stalls(stalls),
        *_of_failures(failures, end_s),
        *_of_lives(histories),
        *_of_the_launcher(trainers, begin_s),
    ]
    spans = tuple(_spans(layers, begin_s, end_s))
    latest = {process.task: process for process in trainers}.values()
    return Account(
        begin_s=begin_s,
        whole_s=end_s - begin_s,
        time_s={
            cause: math.fsum(span.end_s - span.begin_s for span in spans if span.cause == cause)
            for cause in CAUSES
        },
        spans=spans,
        num_steps=_num_kept(stretches, limits),
        num_repeated=_num_repeated(histories),
        failures=tuple(_after(failure, begin_s) for failure in failures),
        is_over=all(any(isinstance(e, EndEvent) for e in process.events) for process in latest),
        num_processes=len(run.processes),
        problems=run.problems,
    )


@dataclasses.dataclass(frozen=True)
class _Layer:
    begin_s: float
    end_s: float
    rank: int
    share: float = 1.0
    keeping_share: float = 0.0


def _of_steps(stretches: Iterable[Stretch], limits: Limits) -> Iterator[_Layer]:
    for stretch in stretches:
        if not stretch.is_first:
            part = limits.num_kept(stretch) / stretch.num_steps
            middle_s = stretch.begin_s + part * (stretch.end_s - stretch.begin_s)
            shares = (stretch.share, stretch.keeping_share)
            yield _Layer(stretch.begin_s, middle_s, _KEPT, *shares)
            yield _Layer(middle_s, stretch.end_s, _REPEATED, *shares)


def _of_stalls(stalls: Iterable[Stall]) -> Iterator[_Layer]:
    for stall in stalls:
        yield _Layer(stall.begin_s, stall.end_s, _NOT_SAVED if stall.failed else _SAVED)


def _of_failures(failures: Iterable[Failure], end_s: float) -> Iterator[_Layer]:
    for failure in failures:
        if failure.sign_of_life_s is not None:
            yield _Layer(failure.sign_of_life_s, failure.told_s, _DETECTING)
        resumed_s = end_s if failure.resumed_s is None else failure.resumed_s
        yield _Layer(failure.told_s, resumed_s, _RESTARTING)


def _of_lives(histories: Iterable[History]) -> Iterator[_Layer]:
    for history in histories:
        for life in history.lives:
            yield _Layer(life.begin_s, life.end_s, _STARTING if life.is_start else _RESTARTING)


def _of_the_launcher(trainers: Sequence[ProcessEvents], begin_s: float) -> Iterator[_Layer]:
    """What the launcher does before the first task that trains is there, such as loading JAX."""
    first_s = min((process.at_s(process.start) for process in trainers), default=begin_s)
    yield _Layer(begin_s, first_s, _STARTING)


def _spans(layers: Iterable[_Layer], begin_s: float, end_s: float) -> Iterator[Span]:
    """The causes of all moments; those in a row with the same one are put together."""
    cause, from_s, to_s = "", 0.0, 0.0
    for moment in _moments(layers, begin_s, end_s):
        length_s = moment.end_s - moment.begin_s
        done_s = moment.begin_s + moment.share * length_s
        parts = (
            (done_s, moment.rank),
            (min(done_s + moment.keeping_share * length_s, moment.end_s), _SAVED),
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


def _moments(layers: Iterable[_Layer], begin_s: float, end_s: float) -> Iterator[_Layer]:
    """Goes through the time once, and takes at each moment the first in rank of what is true."""
    waiting = [layer for layer in layers if max(layer.begin_s, begin_s) < min(layer.end_s, end_s)]
    waiting.sort(key=lambda layer: layer.begin_s, reverse=True)
    edges = {edge for layer in waiting for edge in (layer.begin_s, layer.end_s)}
    inside = sorted(edge for edge in edges if begin_s < edge < end_s)
    # Of several of a rank, the one that was busy least: the others have waited for it.
    active: list[tuple[int, float, float, float]] = []
    for from_s, to_s in itertools.pairwise([begin_s, *inside, end_s]):
        while waiting and waiting[-1].begin_s <= from_s:
            layer = waiting.pop()
            order = (layer.rank, layer.share, layer.keeping_share, layer.end_s)
            heapq.heappush(active, order)
        while active and active[0][-1] <= from_s:
            heapq.heappop(active)
        rank, share, keeping_share = active[0][:-1] if active else (_WAITING, 1.0, 0.0)
        yield _Layer(from_s, to_s, rank, share, keeping_share)


def _num_kept(stretches: Iterable[Stretch], limits: Limits) -> int:
    """How many numbers the kept steps have."""
    ranges = sorted(
        (stretch.step - stretch.num_steps, stretch.step - stretch.num_steps + kept)
        for stretch in stretches
        if (kept := limits.num_kept(stretch)) > 0
    )
    num_kept, reached = 0, -math.inf
    for first, last in ranges:
        num_kept += max(0, last - int(max(first, reached)))
        reached = max(reached, last)
    return num_kept


def _num_repeated(histories: Iterable[History]) -> int:
    """How far the group went back, in all."""
    changes: list[tuple[float, int, int]] = []
    for history in histories:
        changes += [(stretch.end_s, 0, stretch.step) for stretch in history.stretches]
        changes += [(position.at_s, 1, position.step) for position in history.positions]
    num_repeated, reached = 0, 0
    for _, is_position, step in sorted(changes):
        if is_position:
            num_repeated += max(0, reached - step)
            reached = min(reached, step)
        else:
            reached = max(reached, step)
    return num_repeated


def _after(failure: Failure, begin_s: float) -> Failure:
    life_s, resumed_s = failure.sign_of_life_s, failure.resumed_s
    return dataclasses.replace(
        failure,
        told_s=failure.told_s - begin_s,
        sign_of_life_s=None if life_s is None else life_s - begin_s,
        resumed_s=None if resumed_s is None else resumed_s - begin_s,
    )


def _median_and_worst(times_s: Sequence[float]) -> dict[str, float] | None:
    if not times_s:
        return None
    ordered, middle = sorted(times_s), len(times_s) // 2
    median_s = ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
    return {"median": median_s, "worst": ordered[-1]}

"""Breakdown of a run's wall time into useful steps and causes of loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from stratagem.observe.goodput.history import (
    Failure,
    History,
    RetainedSteps,
    StepInterval,
    StepTimes,
    failures_of,
    history_of,
)
from stratagem.observe.goodput.time_spans import (
    CAUSES,
    MemberChange,
    Span,
    lost_processes,
    member_changes,
    spans_of,
)
from stratagem.observe.run_events.reader import ProcessEvents, RunEvents
from stratagem.observe.run_events.records import EndEvent


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
                {
                    "told_s": failure.told_s,
                    "what": failure.what,
                    "detect_s": failure.detect_s,
                    "resume_s": failure.resume_s,
                    "silence_s": failure.silence_s,
                }
                for failure in self.failures
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
    stalls = [stall for history in histories for stall in history.stalls]
    failures = failures_of(group, StepTimes(intervals), stalls, lost=lost)
    times_s = begin_s, _, end_s = _bounds(group)
    spans = spans_of(histories, failures, changes, retained, times_s=times_s)
    return Account(
        begin_s=begin_s,
        whole_s=end_s - begin_s,
        time_s=_time_by_cause(spans),
        spans=spans,
        num_steps=_num_useful(intervals, retained),
        num_repeated=_num_repeated(histories),
        failures=tuple(_relative_to(failure, begin_s) for failure in failures),
        is_over=_is_over([one for one in trainers if one.start not in lost]),
        num_processes=len(run.processes),
        problems=run.problems,
        member_changes=tuple(_change_relative_to(change, begin_s) for change in changes),
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
    for _, is_resume_point, step in sorted(changes):
        if is_resume_point:
            num_repeated += max(0, reached - step)
            reached = min(reached, step)
        else:
            reached = max(reached, step)
    return num_repeated


def _relative_to(failure: Failure, begin_s: float) -> Failure:
    life_s, resumed_s = failure.sign_of_life_s, failure.resumed_s
    return dataclasses.replace(
        failure,
        told_s=failure.told_s - begin_s,
        sign_of_life_s=None if life_s is None else life_s - begin_s,
        resumed_s=None if resumed_s is None else resumed_s - begin_s,
    )


def _change_relative_to(change: MemberChange, begin_s: float) -> MemberChange:
    return dataclasses.replace(
        change, at_s=change.at_s - begin_s, resumed_s=change.resumed_s - begin_s
    )


def _median_and_worst(times_s: Sequence[float]) -> dict[str, float] | None:
    if not times_s:
        return None
    ordered, middle = sorted(times_s), len(times_s) // 2
    median_s = ordered[middle] if len(ordered) % 2 else sum(ordered[middle - 1 : middle + 1]) / 2
    return {"median": median_s, "worst": ordered[-1]}

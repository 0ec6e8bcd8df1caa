"""Rounds in which the two revisions take turns, over several starts of their processes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.cases import Environments
from benchmarks.compare.intervals import Interval, bootstrap, noise_of
from benchmarks.compare.revisions import Tree
from benchmarks.compare.subjects import Subject, ask
from benchmarks.machine import busy_cores
from benchmarks.runner import Effort, order_of_round
from benchmarks.worker_process import WorkerProcess

__all__ = ["Compared", "Plan", "compare_subject"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Trees and effort of a comparison.

    Args:
        trees: the working tree, then the base.
        environments: interpreters of the workers.
        effort: rounds of each start, and limits.
        num_starts: starts of the processes.
        idle_s: duration of each look at the load of other programs.
    """

    trees: tuple[Tree, Tree]
    environments: Environments
    effort: Effort
    num_starts: int
    idle_s: float = 1.0


@dataclasses.dataclass(frozen=True)
class Compared:
    """Times of one case.

    Args:
        case: name.
        times_s: seconds of a unit of work; for each tree, start and round.
        busy_cores: cores that other programs used while this comparison was idle, at each start.
    """

    case: str
    times_s: tuple[tuple[tuple[float, ...], ...], ...]
    busy_cores: tuple[float, ...]

    @property
    def interval(self) -> Interval:
        """Ratio of the base's time to ours, with its interval."""
        ours, base = self.times_s
        return bootstrap(
            [
                [theirs / mine for mine, theirs in zip(*pair, strict=True)]
                for pair in zip(ours, base, strict=True)
            ]
        )

    @property
    def noise(self) -> float:
        """Median relative distance of a round's time from the median, of the noisier tree."""
        return max(map(noise_of, self.times_s))


def compare_subject(
    subject: Subject,
    plan: Plan,
    progress: Callable[[str], None],
    report: Callable[[str], None] = lambda line: None,
) -> list[Compared]:
    """Measures the cases of a subject on both trees.

    Args:
        subject: the work.
        plan: trees and effort.
        progress: receives what is being measured.
        report: receives a line for each case of each start, with the ratio of that start.

    Raises:
        WorkerError: a process ended, or did not answer in time.
    """
    times: dict[str, tuple[list[tuple[float, ...]], ...]] = {
        case: ([], []) for case in subject.cases
    }
    busy: list[float] = []
    for start in range(plan.num_starts):
        busy.append(busy_cores(plan.idle_s))
        with contextlib.ExitStack() as stack:
            fleets: list[list[WorkerProcess]] = [[], []]
            for place in order_of_round(2, start):
                tree = plan.trees[place]
                progress(f"start {start + 1}: {tree.name}")
                fleets[place] = subject.start(stack, tree, plan.environments)
                for worker in fleets[place]:
                    worker.read_answer(plan.effort.start_limit_s)
            for case in subject.cases:
                progress(f"start {start + 1}: {case}")
                ours, base = _rounds(subject, case, fleets, plan.effort)
                for place, rounds in enumerate((ours, base)):
                    times[case][place].append(tuple(rounds))
                ratio = statistics.median(base) / statistics.median(ours)
                report(f"start {start + 1} of {plan.num_starts}: {case}: {ratio:.3f}")
    return [
        Compared(case, (tuple(ours), tuple(base)), tuple(busy))
        for case, (ours, base) in times.items()
    ]


def _rounds(
    subject: Subject, case: str, fleets: Sequence[Sequence[WorkerProcess]], effort: Effort
) -> list[list[float]]:
    def seconds(place: int, amount: int) -> float:
        question = subject.question(case, amount)
        return subject.seconds(case, amount, ask(fleets[place], question, effort.answer_limit_s))

    places = range(len(fleets))
    for place in places:
        seconds(place, 1)  # compiles
    slowest_s = max(_elapsed_s(functools.partial(seconds, place, 1)) for place in places)
    amount = max(1, round(effort.round_s / slowest_s))
    for place in places:
        seconds(place, amount)
    times: list[list[float]] = [[] for _ in places]
    for number in range(effort.num_rounds):
        for place in order_of_round(len(fleets), number):
            times[place].append(seconds(place, amount))
    return times


def _elapsed_s(measure: Callable[[], float]) -> float:
    """Returns the seconds that a measurement takes, with the work around the part it measures."""
    start_s = time.perf_counter()
    measured_s = measure()
    return max(measured_s, time.perf_counter() - start_s)

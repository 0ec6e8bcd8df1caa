"""Figures of a run whose workers are killed and join again, from the times of its steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

__all__ = ["Step", "SurvivorFigures", "changes_of", "figures_of", "read_steps"]


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of the training.

    Args:
        number: how many were before it.
        time_s: when its first process had done it, by the machine's clock.
        members: the workers whose values it combines.
    """

    number: int
    time_s: float
    members: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SurvivorFigures:
    """What kills and joins have cost.

    Args:
        wall_s: from the first step to the last.
        num_steps: steps of the training.
        num_losses: changes in which workers were lost.
        num_joins: changes in which workers joined.
        step_s: median time of a step.
        goodput: share of the time without these pauses and stops. What a start of a process takes
            from the others on the same cores is not in it.
        pause_s: median and 99th percentile of what a step with a loss took longer.
        join_steps: median and 99th percentile of what a step with a join took longer, in steps.
    """

    wall_s: float
    num_steps: int
    num_losses: int
    num_joins: int
    step_s: float
    goodput: float
    pause_s: tuple[float, float]
    join_steps: tuple[float, float]


def read_steps(folder: Path) -> list[Step]:
    """Returns the recorded steps in their order, each at its earliest time."""
    found: dict[int, Step] = {}
    for path in folder.glob("steps-*"):
        for line in path.read_text(encoding="ascii").splitlines():
            _, number, time_s, members = line.split()
            step = Step(int(number), float(time_s), tuple(map(int, members.split(","))))
            before = found.setdefault(step.number, step)
            assert before.members == step.members, (before, step)
            if step.time_s < before.time_s:
                found[step.number] = step
    return [found[number] for number in sorted(found)]


def changes_of(steps: Sequence[Step]) -> tuple[list[tuple[int, int]], list[int]]:
    """Returns kills as pairs of a worker and a step, and steps before which workers joined."""
    kills: list[tuple[int, int]] = []
    joins: list[int] = []
    for before, step in itertools.pairwise(steps):
        kills += [(worker, step.number) for worker in before.members if worker not in step.members]
        if not set(step.members) <= set(before.members):
            joins.append(step.number)
    return kills, joins


def figures_of(steps: Sequence[Step]) -> SurvivorFigures:
    """Returns what kills and joins have cost; an epoch's end counts as part of the next step."""
    times = np.diff([step.time_s for step in steps])
    step_s = float(np.median(times))
    kills, joins = changes_of(steps)
    first = steps[0].number + 1
    losses = sorted({number - first for _, number in kills})
    # A step in which another process has joined at once is a pause of a loss.
    joined = [number - first for number in joins if number - first not in losses]
    pauses = np.maximum(0, times[losses] - step_s) if losses else np.zeros(1)
    stops = np.maximum(0, times[joined] - step_s) if joined else np.zeros(1)
    wall_s = float(times.sum())
    return SurvivorFigures(
        wall_s=wall_s,
        num_steps=len(steps),
        num_losses=len(losses),
        num_joins=len(joins),
        step_s=step_s,
        goodput=1 - float(pauses.sum() + stops.sum()) / wall_s,
        pause_s=_spread(pauses),
        join_steps=_spread(stops / step_s),
    )


def _spread(values: np.ndarray) -> tuple[float, float]:
    return float(np.median(values)), float(np.percentile(values, 99))

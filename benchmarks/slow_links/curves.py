"""Figures of training: curves, and what they say about other links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["TOLERANCE", "Cost", "Point", "Training", "num_timed_steps", "target_loss"]

# So much worse than lockstep's last loss is the loss to be reached.
TOLERANCE = 0.02
_TIMED_S, _FEWEST_STEPS, _MOST_STEPS = 8.0, 6, 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Training so far.

    Args:
        steps: number of them.
        seconds: what they took on the link of the run, without compiling and validating.
        num_bytes: sent by one worker.
        loss: of training, averaged over the steps since the last point.
        validation_loss: after the last step.
    """

    steps: int
    seconds: float
    num_bytes: int
    loss: float
    validation_loss: float


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a loss has cost.

    Args:
        steps: number of them.
        seconds: what they took on the link of the run.
        num_bytes: sent by one worker.
    """

    steps: float
    seconds: float
    num_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A method's training of a model.

    Losses depend on steps, and not on the link. So there is one curve, and the time of a step for
    each other link.

    Args:
        task: name of the trial.
        method: name of the method.
        points: the curve.
        step_s: seconds of a step by link, averaged over periods; the first link is that of the
            curve.
        step_bytes: bytes that a worker sends in a step, likewise.
        step_cpu_s: CPU seconds of a worker in a step, likewise; other programs change them little.
    """

    task: str
    method: str
    points: tuple[Point, ...]
    step_s: Mapping[str, float]
    step_bytes: Mapping[str, float]
    step_cpu_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Training:
        """Returns what `dataclasses.asdict` made a dictionary of."""
        points = tuple(Point(**one) for one in told["points"])
        return dataclasses.replace(cls(**told), points=points)

    @property
    def last_loss(self) -> float:
        """Validation loss at the end."""
        return self.points[-1].validation_loss

    @property
    def own_link(self) -> str:
        """The link of the curve."""
        return next(iter(self.step_s))

    def cost_of(self, target: float) -> Cost | None:
        """Returns what a validation loss cost, between two points in proportion; None if never.

        Args:
            target: validation loss.
        """
        first = self.points[0]
        if first.validation_loss <= target:
            return Cost(first.steps, first.seconds, first.num_bytes)
        for before, after in pairwise(self.points):
            if after.validation_loss <= target:
                fall = before.validation_loss - after.validation_loss
                part = (before.validation_loss - target) / fall
                return Cost(
                    before.steps + part * (after.steps - before.steps),
                    before.seconds + part * (after.seconds - before.seconds),
                    before.num_bytes + part * (after.num_bytes - before.num_bytes),
                )
        return None

    def seconds_to(self, target: float, link: str) -> float | None:
        """Returns the seconds to a validation loss: measured, or on other links by their steps.

        Args:
            target: validation loss.
            link: name of the link.
        """
        cost = self.cost_of(target)
        return None if cost is None else self._scaled(cost, link)

    def seconds_at(self, point: Point, link: str) -> float:
        """Returns the seconds to a point, likewise."""
        return self._scaled(point, link)

    def _scaled(self, cost: Point | Cost, link: str) -> float:
        return cost.seconds if link == self.own_link else cost.steps * self.step_s[link]


def target_loss(trainings: Sequence[Training]) -> float:
    """Returns the validation loss to be reached: a little above the last one of lockstep.

    Args:
        trainings: of one trial; the first is in lockstep.
    """
    return (1 + TOLERANCE) * trainings[0].last_loss


def num_timed_steps(step_s: float, step_bytes: float, rate_bits_per_s: float, period: int) -> int:
    """Returns how many steps to time on a link: some seconds of them, and whole periods.

    Args:
        step_s: seconds of a step on a fast link.
        step_bytes: bytes sent in a step.
        rate_bits_per_s: of the link.
        period: steps from one synchronization to the next.
    """
    expected_s = step_s + 8 * step_bytes / rate_bits_per_s
    wanted = min(max(_TIMED_S / expected_s, _FEWEST_STEPS), _MOST_STEPS)
    return period * max(1, round(wanted / period))

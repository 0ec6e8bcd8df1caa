"""Figures of training: curves, and what they say about other links."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = ["Point", "Training", "num_timed_steps", "target_loss", "whole_bytes", "whole_seconds"]

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A method's training of a model.

    Losses depend on steps, and not on the link. So there is one curve, and the time of a step for
    each link.

    Args:
        task: name of the model.
        method: name of the method.
        points: the curve.
        step_s: seconds of a step, averaged over periods, by link.
        step_bytes: bytes that a worker sends in a step, likewise, by link.
    """

    task: str
    method: str
    points: tuple[Point, ...]
    step_s: Mapping[str, float]
    step_bytes: Mapping[str, float]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Training:
        """Returns what `dataclasses.asdict` made a dictionary of."""
        points = tuple(Point(**one) for one in told["points"])
        return dataclasses.replace(cls(**told), points=points)

    @property
    def last_loss(self) -> float:
        """Validation loss at the end."""
        return self.points[-1].validation_loss

    def steps_to(self, target: float) -> float | None:
        """Returns the steps to a validation loss, between two points in proportion; None if never.

        Args:
            target: validation loss.
        """
        if self.points[0].validation_loss <= target:
            return self.points[0].steps
        for before, after in pairwise(self.points):
            if after.validation_loss <= target:
                fall = before.validation_loss - after.validation_loss
                part = (before.validation_loss - target) / fall
                return before.steps + part * (after.steps - before.steps)
        return None


def target_loss(trainings: Sequence[Training]) -> float:
    """Returns the validation loss to be reached: a little above the last one of lockstep.

    Args:
        trainings: of one model; the first is in lockstep.
    """
    return (1 + TOLERANCE) * trainings[0].last_loss


def whole_seconds(training: Training, target: float, link: str) -> float | None:
    """Returns the seconds to a validation loss on a link, or None if it is never reached."""
    steps = training.steps_to(target)
    return None if steps is None else steps * training.step_s[link]


def whole_bytes(training: Training, target: float, link: str) -> float | None:
    """Returns the bytes that a worker sends up to a validation loss, or None."""
    steps = training.steps_to(target)
    return None if steps is None else steps * training.step_bytes[link]


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

"""When to save, and what to keep: values that decide, and do nothing else."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from stratagem.messages import explain

__all__ = [
    "Any",
    "KeepEveryHours",
    "KeepLatest",
    "KeepPolicy",
    "Kept",
    "Moment",
    "SaveEverySeconds",
    "SaveEverySteps",
    "SavePolicy",
]


@dataclasses.dataclass(frozen=True)
class Moment:
    """Where training stands, for those who decide whether to save.

    Args:
        step: the step that is done, from 1.
        time_s: now, in seconds of a clock that only goes forward.
        saved_step: the step of the last save, or the one at which training began.
        saved_time_s: when that was.
    """

    step: int
    time_s: float
    saved_step: int
    saved_time_s: float


@dataclasses.dataclass(frozen=True)
class Kept:
    """A checkpoint, for those who decide whether to keep it.

    Args:
        number: of the checkpoint.
        time_s: when it was saved, in seconds since the epoch.
    """

    number: int
    time_s: float


@runtime_checkable
class SavePolicy(Protocol):
    """Decides when to save."""

    def is_due(self, moment: Moment) -> bool:
        """Tells whether to save now.

        Args:
            moment: where training stands.
        """
        ...


@runtime_checkable
class KeepPolicy(Protocol):
    """Decides which checkpoints to keep."""

    def keeps(self, checkpoints: Sequence[Kept]) -> set[int]:
        """Returns the numbers of those to keep.

        Args:
            checkpoints: what is there, the oldest first.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SaveEverySteps:
    """Saves when so many steps are done since the last save.

    Args:
        steps: how many.

    Raises:
        ValueError: not a positive whole number.

    Example:
        >>> from stratagem.checkpoint import Moment, SaveEverySteps
        >>> moment = Moment(step=110, time_s=9.0, saved_step=10, saved_time_s=0.0)
        >>> SaveEverySteps(100).is_due(moment), SaveEverySteps(101).is_due(moment)
        (True, False)
    """

    steps: int

    def __post_init__(self) -> None:
        _check_count(self, "steps", self.steps)

    def is_due(self, moment: Moment) -> bool:
        """Tells whether to save now.

        Args:
            moment: where training stands.
        """
        return moment.step - moment.saved_step >= self.steps


@dataclasses.dataclass(frozen=True)
class SaveEverySeconds:
    """Saves when the last save was so long ago.

    Where several processes train, process 0's clock decides for all.

    Args:
        seconds: how long.

    Raises:
        ValueError: not positive.

    Example:
        >>> from stratagem.checkpoint import Moment, SaveEverySeconds
        >>> moment = Moment(step=1, time_s=60.0, saved_step=0, saved_time_s=0.0)
        >>> SaveEverySeconds(60).is_due(moment), SaveEverySeconds(61).is_due(moment)
        (True, False)
    """

    seconds: float

    def __post_init__(self) -> None:
        _check_positive(self, "seconds", self.seconds)

    def is_due(self, moment: Moment) -> bool:
        """Tells whether to save now.

        Args:
            moment: where training stands.
        """
        return moment.time_s - moment.saved_time_s >= self.seconds


@dataclasses.dataclass(frozen=True)
class KeepLatest:
    """Keeps the newest checkpoints.

    Args:
        count: how many.

    Raises:
        ValueError: not a positive whole number.

    Example:
        >>> from stratagem.checkpoint import KeepLatest, Kept
        >>> sorted(KeepLatest(2).keeps([Kept(1, 0.0), Kept(2, 9.0), Kept(3, 9.5)]))
        [2, 3]
    """

    count: int

    def __post_init__(self) -> None:
        _check_count(self, "count", self.count)

    def keeps(self, checkpoints: Sequence[Kept]) -> set[int]:
        """Returns the numbers of those to keep.

        Args:
            checkpoints: what is there, the oldest first.
        """
        return {kept.number for kept in checkpoints[-self.count :]}


@dataclasses.dataclass(frozen=True)
class KeepEveryHours:
    """Keeps the first checkpoint, and each that is so much newer than the last one kept by this.

    Args:
        hours: how much; a fraction is one, too.

    Raises:
        ValueError: not positive.

    Example:
        >>> from stratagem.checkpoint import KeepEveryHours, Kept
        >>> hourly = [Kept(1, 0.0), Kept(2, 1800.0), Kept(3, 3600.0), Kept(4, 5400.0)]
        >>> sorted(KeepEveryHours(1).keeps(hourly))
        [1, 3]

    Source: TF 2.21 checkpoint_management.py, CheckpointManager, keep_checkpoint_every_n_hours.
    """

    hours: float

    def __post_init__(self) -> None:
        _check_positive(self, "hours", self.hours)

    def keeps(self, checkpoints: Sequence[Kept]) -> set[int]:
        """Returns the numbers of those to keep.

        Args:
            checkpoints: what is there, the oldest first.
        """
        numbers: set[int] = set()
        last_s = -math.inf
        for kept in checkpoints:
            if kept.time_s - last_s >= self.hours * 3600:
                numbers.add(kept.number)
                last_s = kept.time_s
        return numbers


class Any:
    """Saves, or keeps, where one of several policies does.

    Args:
        *policies: of one kind, those that decide when to save or those that decide what to keep.

    Raises:
        ValueError: no policies, or of two kinds.

    Example:
        >>> from stratagem.checkpoint import Any, KeepEveryHours, KeepLatest, Kept
        >>> policy = Any(KeepLatest(1), KeepEveryHours(24))
        >>> sorted(policy.keeps([Kept(1, 0.0), Kept(2, 60.0), Kept(3, 120.0)]))
        [1, 3]
    """

    def __init__(self, *policies: SavePolicy | KeepPolicy) -> None:
        self._savers = tuple(policy for policy in policies if isinstance(policy, SavePolicy))
        self._keepers = tuple(policy for policy in policies if isinstance(policy, KeepPolicy))
        if not policies or len(policies) not in (len(self._savers), len(self._keepers)):
            raise ValueError(
                explain(
                    f"Any({', '.join(map(repr, policies))}) is neither for saving nor for store.",
                    expected="one or more policies, all of one kind.",
                    fix="pass them: Any(SaveEverySteps(1000), SaveEverySeconds(600)).",
                )
            )
        self.policies = policies

    def __repr__(self) -> str:
        return f"Any({', '.join(map(repr, self.policies))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Any) and self.policies == other.policies

    def __hash__(self) -> int:
        return hash(self.policies)

    def is_due(self, moment: Moment) -> bool:
        """Tells whether to save now.

        Args:
            moment: where training stands.
        """
        return any(policy.is_due(moment) for policy in self._savers)

    def keeps(self, checkpoints: Sequence[Kept]) -> set[int]:
        """Returns the numbers of those to keep.

        Args:
            checkpoints: what is there, the oldest first.
        """
        return {number for policy in self._keepers for number in policy.keeps(checkpoints)}


def _check_count(policy: object, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _not_positive(policy, name, value, "a whole number, 1 or more")


def _check_positive(policy: object, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise _not_positive(policy, name, value, "a number above 0")


def _not_positive(policy: object, name: str, value: object, expected: str) -> ValueError:
    return ValueError(
        explain(
            f"{type(policy).__name__}({name}={value!r}) decides nothing.",
            expected=f"{expected}.",
            fix=f"pass such a number as {name}.",
        )
    )

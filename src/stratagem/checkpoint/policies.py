"""Policies that decide when to save a checkpoint and how long to keep it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from stratagem.errors import check_number, invalid


@dataclasses.dataclass(frozen=True)
class Moment:
    """Progress of training, from which a policy decides whether to save.

    Args:
        step: number of completed steps.
        time_s: current time in seconds, on a monotonic clock.
        saved_step: step of the last save, or of the start of training.
        saved_time_s: time of the last save in seconds, on the same clock.
    """

    step: int
    time_s: float
    saved_step: int
    saved_time_s: float


@dataclasses.dataclass(frozen=True)
class RetainedCheckpoint:
    """A checkpoint on disk, for which a policy decides whether to keep it.

    Args:
        number: number of the checkpoint.
        time_s: time of the save, in seconds since the epoch.
    """

    number: int
    time_s: float


@runtime_checkable
class SavePolicy(Protocol):
    """Decides when to save."""

    def is_due(self, moment: Moment) -> bool:
        """Returns True if a checkpoint should be saved now.

        Args:
            moment: progress of training.
        """
        ...


@runtime_checkable
class KeepPolicy(Protocol):
    """Decides which checkpoints to keep."""

    def keeps(self, checkpoints: Sequence[RetainedCheckpoint]) -> set[int]:
        """Returns the numbers of the checkpoints to keep.

        Args:
            checkpoints: all checkpoints, oldest first.
        """
        ...


@dataclasses.dataclass(frozen=True)
class SaveEverySteps:
    """Saves once this many steps have passed since the last save.

    Args:
        steps: minimum steps between saves, 1 or more.

    Raises:
        TypeError: `steps` is no integer.
        ValueError: `steps` is not positive.

    Example:
        >>> import tempfile
        >>> step = sg.Variable(0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sg.train.CheckpointManager(
        ...         sg.train.Checkpoint(step=step), folder, max_to_keep=None, step_counter=step,
        ...         checkpoint_interval=sg.checkpoint.SaveEverySteps(100))
        ...     for number in (99, 100, 101):
        ...         _ = step.assign(number)
        ...         print(number, manager.save() is not None)
        99 False
        100 True
        101 False

    Source: specific to Stratagem.
    """

    steps: int

    def __post_init__(self) -> None:
        check_number("SaveEverySteps", steps=self.steps)

    def is_due(self, moment: Moment) -> bool:
        """Returns True if a checkpoint should be saved now."""
        return moment.step - moment.saved_step >= self.steps


@dataclasses.dataclass(frozen=True)
class SaveEverySeconds:
    """Saves once this much time has passed since the last save.

    With several processes, the clock of process 0 decides.

    Args:
        seconds: minimum time between saves in seconds, above 0.

    Raises:
        ValueError: `seconds` is not positive.

    Example:
        >>> import tempfile
        >>> step = sg.Variable(0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sg.train.CheckpointManager(
        ...         sg.train.Checkpoint(step=step), folder, max_to_keep=None, step_counter=step,
        ...         checkpoint_interval=sg.checkpoint.SaveEverySeconds(3600))
        ...     print(manager.save())  # an hour has not passed
        None

    Source: specific to Stratagem.
    """

    seconds: float

    def __post_init__(self) -> None:
        check_number("SaveEverySeconds", above=0, seconds=self.seconds)

    def is_due(self, moment: Moment) -> bool:
        """Returns True if a checkpoint should be saved now."""
        return moment.time_s - moment.saved_time_s >= self.seconds


@dataclasses.dataclass(frozen=True)
class KeepLatest:
    """Keeps the newest checkpoints.

    Args:
        count: number of checkpoints to keep, 1 or more.

    Raises:
        TypeError: `count` is no integer.
        ValueError: `count` is not positive.

    Example:
        >>> import os, tempfile
        >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sg.train.CheckpointManager(
        ...         checkpoint, folder, max_to_keep=sg.checkpoint.KeepLatest(2))
        ...     saved = [manager.save() for _ in range(3)]
        ...     print([os.path.basename(path) for path in manager.checkpoints])
        ['ckpt-2', 'ckpt-3']

    Source: TF 2.21 checkpoint_management.py, CheckpointManager, max_to_keep.
    """

    count: int

    def __post_init__(self) -> None:
        check_number("KeepLatest", count=self.count)

    def keeps(self, checkpoints: Sequence[RetainedCheckpoint]) -> set[int]:
        """Returns the numbers of the checkpoints to keep."""
        return {checkpoint.number for checkpoint in checkpoints[-self.count :]}


@dataclasses.dataclass(frozen=True)
class KeepEveryHours:
    """Keeps the first checkpoint, and then at most one per this many hours.

    Args:
        hours: minimum hours between kept checkpoints; may be a fraction.

    Raises:
        ValueError: `hours` is not positive.

    Example:
        >>> import os, tempfile
        >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sg.train.CheckpointManager(
        ...         checkpoint, folder, max_to_keep=sg.checkpoint.KeepEveryHours(1))
        ...     saved = [manager.save() for _ in range(3)]  # the newest is always kept
        ...     print([os.path.basename(path) for path in manager.checkpoints])
        ['ckpt-1', 'ckpt-3']

    Source: TF 2.21 checkpoint_management.py, CheckpointManager, keep_checkpoint_every_n_hours.
    """

    hours: float

    def __post_init__(self) -> None:
        check_number("KeepEveryHours", above=0, hours=self.hours)

    def keeps(self, checkpoints: Sequence[RetainedCheckpoint]) -> set[int]:
        """Returns the numbers of the checkpoints to keep."""
        numbers: set[int] = set()
        last_s = -math.inf
        for checkpoint in checkpoints:
            if checkpoint.time_s - last_s >= self.hours * 3600:
                numbers.add(checkpoint.number)
                last_s = checkpoint.time_s
        return numbers


class Any:
    """Saves or keeps a checkpoint if any of several policies does.

    Args:
        *policies: all save policies, or all keep policies.

    Raises:
        ValueError: no policies, or policies of both kinds.

    Example:
        >>> import os, tempfile
        >>> policy = sg.checkpoint.Any(
        ...     sg.checkpoint.KeepLatest(2), sg.checkpoint.KeepEveryHours(24))
        >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sg.train.CheckpointManager(checkpoint, folder, max_to_keep=policy)
        ...     saved = [manager.save() for _ in range(4)]
        ...     print([os.path.basename(path) for path in manager.checkpoints])
        ['ckpt-1', 'ckpt-3', 'ckpt-4']

    Source: specific to Stratagem.
    """

    def __init__(self, *policies: SavePolicy | KeepPolicy) -> None:
        self._savers = tuple(policy for policy in policies if isinstance(policy, SavePolicy))
        self._keepers = tuple(policy for policy in policies if isinstance(policy, KeepPolicy))
        if not policies or len(policies) not in (len(self._savers), len(self._keepers)):
            raise invalid(
                f"Any({', '.join(map(repr, policies))}) mixes kinds of policies or is empty.",
                expected="one or more save policies, or one or more keep policies.",
                fix="pass such policies: Any(SaveEverySteps(1000), SaveEverySeconds(600)).",
            )
        self.policies = policies

    def __repr__(self) -> str:
        return f"Any({', '.join(map(repr, self.policies))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Any) and self.policies == other.policies

    def __hash__(self) -> int:
        return hash(self.policies)

    def is_due(self, moment: Moment) -> bool:
        """Returns True if a checkpoint should be saved now."""
        return any(policy.is_due(moment) for policy in self._savers)

    def keeps(self, checkpoints: Sequence[RetainedCheckpoint]) -> set[int]:
        """Returns the numbers of the checkpoints to keep."""
        return {number for policy in self._keepers for number in policy.keeps(checkpoints)}

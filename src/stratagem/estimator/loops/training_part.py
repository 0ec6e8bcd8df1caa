"""What a process does of a training that other processes do, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stratagem.checkpoint.group_calls import is_first
from stratagem.estimator.loops.batches import InputFunction, ModelBatches
from stratagem.estimator.steps.model_step import ModelStep
from stratagem.keras.dataset_creator import DatasetCreator, part_of

__all__ = ["OwnProgram", "TrainingPart"]


class TrainingPart:
    """The part of a process by itself, and of processes in lockstep: all do the same.

    Args:
        strategy: of the training.

    `is_chief` tells whether this process writes, `saves` whether it takes part in saving
    checkpoints, and `counts_all` whether steps count that others make and this process does not
    see.
    """

    saves = True
    counts_all = False

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.is_chief = is_first()

    @property
    def num_workers(self) -> int:
        """How many processes train."""
        topology = self._strategy.topology
        return topology.num_replicas // topology.num_local_replicas

    def wait(self, limit_s: float) -> None:
        """Waits for who makes the variables, before the model function is called.

        Args:
            limit_s: how long.
        """

    def begin(self, give: Callable[[], bool]) -> bool:
        """Gives variables, which are there, the values that training begins with.

        Args:
            give: does so; tells whether they are those of an earlier training.

        Returns:
            What `give` tells.
        """
        return give()

    def batches(self, input_fn: InputFunction) -> Any:
        """Returns the batches that this process trains on.

        Args:
            input_fn: the input function, with its arguments.
        """
        return ModelBatches(input_fn, self._strategy)

    def run(self, step: ModelStep, batch: Any) -> Any:
        """Runs a step.

        Args:
            step: of training.
            batch: what the step is of.

        Returns:
            What hooks may fetch.
        """
        return step.run(batch)

    def finish(self) -> Any:
        """Waits for steps that run elsewhere.

        Returns:
            What hooks may fetch of the last one; None where nothing was waited for.
        """
        return None

    def skip(self) -> None:
        """Notes that this training has nothing to do."""


class OwnProgram(TrainingPart):
    """The part of a worker with a program of its own, of several on the same parameter servers.

    The chief alone makes variables, gives them their values and saves; the others find them.

    Args:
        strategy: of the training.
    """

    counts_all = True

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        worker, self._num_workers = strategy.executor.worker
        self.is_chief = self.saves = worker == 0
        self._cluster: Any = strategy.cluster
        self._number = 0

    @property
    def num_workers(self) -> int:
        """How many processes train."""
        return self._num_workers

    def batches(self, input_fn: InputFunction) -> Any:
        """Returns the batches of this worker's part of the data."""
        worker, num_workers = self._strategy.executor.worker
        are_in_sync = self._strategy.placement.remote.variables.mode.num_needed > 0
        own = part_of(DatasetCreator(input_fn), worker, num_workers, are_in_sync=are_in_sync)
        return ModelBatches(own, self._strategy)

    def wait(self, limit_s: float) -> None:
        """Waits until the chief has begun this training."""
        self._number = self._cluster.next_training()
        if not self.is_chief:
            self._cluster.wait_for_begin(self._number, limit_s)

    def begin(self, give: Callable[[], bool]) -> bool:
        """Gives variables values in the chief, and lets the others begin."""
        if not self.is_chief:
            return True
        are_of_earlier = give()
        self._cluster.begin(self._number)
        return are_of_earlier

    def skip(self) -> None:
        """Notes that this training has nothing to do, and lets nobody wait for it."""
        number = self._cluster.next_training()
        if self.is_chief:
            self._cluster.begin(number)

"""Keras side of remote state: Keras objects whose variables are outside this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import keras

from stratagem.context import ReplicaContext
from stratagem.keras.training.dataset_creator import DatasetCreator
from stratagem.keras.training.unread_data import UnreadData
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.keras.variables.variable_source import VariableRequest

__all__ = ["RemoteKeras"]


class RemoteKeras(Protocol):
    """Variables, optimizers and `fit` of a strategy with remote state: `placement.remote.keras`.

    `optimizer` is a built Keras optimizer, `strategy` the one of the placement.
    """

    def variable_class(self, request: VariableRequest, strategy: Any) -> type[DistributedVariable]:
        """Returns the class of a new variable, which says if and how it is remote."""
        ...

    def create_slot(
        self, optimizer: Any, reference: Any, name: str | None, create: Callable[[], Any]
    ) -> keras.Variable:
        """Creates an optimizer's slot of a remote variable, which is stored with the variable.

        Args:
            optimizer: the optimizer, which is being built.
            reference: the remote variable.
            name: name of the slot.
            create: creates the slot as Keras does.
        """
        ...

    def note_built(self, optimizer: Any, strategy: Any) -> None:
        """Notes that a step of this process has built an optimizer."""
        ...

    def send_gradients(
        self,
        optimizer: Any,
        grads: list[Any],
        variables: list[Any],
        context: ReplicaContext,
        *,
        are_reduced: bool,
    ) -> None:
        """Sends the gradients of a step, if all variables are remote.

        Args:
            optimizer: the optimizer.
            grads: gradients of this replica, weighted for the sum; rows as `IndexedSlices`.
            variables: the variables of the gradients.
            context: the replica context.
            are_reduced: True if the gradients are the same on all replicas already.
        """
        ...

    def apply_in_parts(
        self,
        apply: Callable[[Any, list[Any], Any], Any],
        optimizer: Any,
        grads: list[Any],
        variables: list[Any],
        context: ReplicaContext,
    ) -> None:
        """Updates local variables here, and sends the gradients of the remote ones.

        Args:
            apply: `apply` of the optimizer's class.
            optimizer: the optimizer.
            grads: arrays or `IndexedSlices`, summed over replicas.
            variables: the variables of the gradients.
            context: the replica context.
        """
        ...

    def train_or_test_function(self, model: Any, strategy: Any, *, training: bool) -> Any:
        """Returns a model's `train_function` or `test_function` of an executor that schedules."""
        ...

    def predict_function(self, model: Any, strategy: Any) -> Any:
        """Returns a model's `predict_function` of an executor that schedules."""
        ...

    def worker_data(
        self, strategy: Any, creator: DatasetCreator, name: str, steps: Any, *, is_training: bool
    ) -> UnreadData:
        """Returns the data of `fit`, `evaluate` or `predict` that each worker creates.

        Args:
            strategy: a strategy with an executor that schedules.
            creator: creates the dataset of each worker.
            name: name of the method, for messages.
            steps: number of batches to read; None for all.
            is_training: True for training data of `fit`.
        """
        ...

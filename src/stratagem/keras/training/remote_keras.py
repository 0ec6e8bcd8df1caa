"""Interface `RemoteKeras`: Keras variables, optimizers and `fit` with remote state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import keras

from stratagem.execution.context.replica import ReplicaContext
from stratagem.keras.private import DataAdapter, grouped
from stratagem.keras.training.dataset_creator import DatasetCreator
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.keras.variables.variable_source import VariableRequest

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy

# Base of data adapters that give Keras only the number of batches.


class UnreadData(DataAdapter):
    """Data adapter without batch sizes, and with one kind of iterator."""

    @property
    def batch_size(self) -> None:
        """None: unknown before a batch is read."""
        return None

    @property
    def has_partial_batch(self) -> None:
        """None: unknown before a batch is read."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """None: unknown before a batch is read."""
        return None

    def batches(self) -> Iterator[Any]:
        """Returns an iterator over the batches of an epoch."""
        raise NotImplementedError

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Returns the batches; from Keras 3.16 on, in groups of `super_batch` for its scan."""
        return grouped(self.batches(), super_batch)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns the batches."""
        return self.batches()


class RemoteKeras(Protocol):
    """Variables, optimizers and `fit` of a strategy with remote state: `placement.remote.keras`.

    `optimizer` is a built Keras optimizer, `strategy` the one of the placement.
    """

    def variable_class(
        self, request: VariableRequest, strategy: Strategy
    ) -> type[DistributedVariable]:
        """Returns the class of a new variable, a `DistributedVariable`.

        If `is_all_remote` is False, the class chooses local or remote by path and shape.
        """
        ...

    def create_slot(
        self,
        optimizer: keras.optimizers.Optimizer,
        reference: keras.Variable,
        name: str | None,
        create: Callable[[], Any],
    ) -> keras.Variable:
        """Creates an optimizer's slot of remote variable `reference`, stored with the variable.

        The optimizer is being built. `create` creates the slot as Keras does.
        """
        ...

    def note_built(self, optimizer: keras.optimizers.Optimizer, strategy: Strategy) -> None:
        """Records that a step of this process has built an optimizer."""
        ...

    def send_gradients(
        self,
        optimizer: keras.optimizers.Optimizer,
        grads: list[Any],
        variables: list[Any],
        context: ReplicaContext,
        *,
        are_reduced: bool,
    ) -> None:
        """Sends the gradients of a step if all variables are remote.

        `grads` are this replica's, weighted for the sum; rows as `IndexedSlices`. `are_reduced` is
        True if they are already the same on all replicas.
        """
        ...

    def apply_in_parts(
        self,
        apply: Callable[[Any, list[Any], Any], Any],
        optimizer: keras.optimizers.Optimizer,
        grads: list[Any],
        variables: list[Any],
        context: ReplicaContext,
    ) -> None:
        """Updates local variables and sends the gradients of remote ones.

        `apply` is the method of the optimizer's class. `grads` are summed over replicas.
        """
        ...

    def train_or_test_function(
        self, model: keras.Model, strategy: Strategy, *, training: bool
    ) -> Any:
        """Returns a `train_function` or `test_function` that schedules steps on workers."""
        ...

    def predict_function(self, model: keras.Model, strategy: Strategy) -> Any:
        """Returns a `predict_function` that schedules steps on workers."""
        ...

    def worker_data(
        self,
        strategy: Strategy,
        creator: DatasetCreator,
        name: str,
        steps: object,
        *,
        is_training: bool,
    ) -> UnreadData:
        """Returns the data of `fit`, `evaluate` or `predict` that each worker creates.

        `name` is the method for messages; `steps` is the number of batches, None for all.
        `is_training` is True for training data of `fit`.
        """
        ...

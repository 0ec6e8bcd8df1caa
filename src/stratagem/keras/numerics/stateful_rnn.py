"""Stateful RNNs over replicas: the state has the rows of the global batch, as on one device.

Each replica starts with the state
rows of its examples; the rows of all replicas are gathered for the next batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras

from stratagem.errors import explain
from stratagem.execution.context.replica import ReplicaContext, get_replica_context
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.patches import patches
from stratagem.keras.private import expected_batch_size, with_states


@patches(
    keras.layers.RNN,
    "call",
    why="each replica starts with the state rows of its own examples",
)
def replica_rnn(call: Callable[..., Any]) -> Any:
    """Returns `RNN.call` whose state has the rows of the global batch."""

    @functools.wraps(call)
    def replica_call(
        self: keras.layers.RNN,
        sequences: jax.Array,
        initial_state: object = None,
        mask: object = None,
        training: object = False,
    ) -> Any:
        context = get_replica_context()
        arguments: dict[str, Any] = {"mask": mask, "training": training}
        if not self.stateful or context is None or current_scope() is None:
            return call(self, sequences, initial_state, **arguments)
        check_batch_size(self, sequences, context)
        if context.num_replicas_in_sync == 1 and not context.batch.is_padded:
            return call(self, sequences, initial_state, **arguments)
        first = _first_row(sequences.shape[0], context)
        if initial_state is None:
            initial_state = jax.tree.map(
                lambda state: _own_rows(state.value, first, sequences.shape[0]), self.states
            )
        # A view, because the replicas of an eager step use this layer concurrently.
        states = [_RowsOfReplica(variable, context) for variable in jax.tree.leaves(self.states)]
        return call(with_states(self, states), sequences, initial_state, **arguments)

    return replica_call


class _RowsOfReplica:
    """Replaces a state's variable when a replica assigns its rows."""

    def __init__(self, variable: keras.Variable, context: ReplicaContext) -> None:
        self._variable = variable
        self._context = context

    def assign(self, rows: object) -> None:
        """Sets the rows of all replicas."""
        self._variable.assign(self._context.all_gather(rows, axis=0))


def _first_row(num_rows: int, context: ReplicaContext) -> Any:
    """Returns the index of this replica's first example in the batch."""
    replica, lengths = context.replica_id_in_sync_group, context.batch.lengths
    if lengths is None:
        return replica * num_rows
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    return jnp.asarray(starts, jnp.int32)[replica]


def _own_rows(state: jax.Array, first: int | jax.Array, num_rows: int) -> Any:
    # Padding rows get the state of some true row; their results are dropped.
    rows = jnp.minimum(first + jnp.arange(num_rows), state.shape[0] - 1)
    return jnp.take(state, rows, axis=0)


def check_batch_size(
    layer: keras.layers.RNN, sequences: jax.Array, context: ReplicaContext
) -> None:
    """Raises ValueError if the replicas' rows do not match the state of a stateful layer."""
    expected = expected_batch_size(layer)
    received = context.global_num_examples
    if received is None:
        received = sequences.shape[0] * context.num_replicas_in_sync
    if expected is None or (received == expected and not context.strategy.placement.is_remote):
        return
    strategy = context.strategy
    if strategy.placement.is_remote:
        raise ValueError(
            explain(
                f"{strategy} cannot run the stateful RNN {layer.name!r}.",
                expected="layers without per-example state: each worker reads a different batch, "
                "but servers store a single state.",
                fix="remove stateful=True, or use sg.MirroredStrategy.",
            )
        )
    raise ValueError(
        explain(
            f"The stateful RNN {layer.name!r} has state for {expected} examples, but {strategy} "
            f"passed it {received} in {context.num_replicas_in_sync} replicas.",
            expected="an Input whose batch size is the global batch size.",
            fix=f"batch the data by {expected} and drop a shorter last batch, or build the model "
            f"with keras.Input(batch_shape=({received}, ...)).",
        )
    )

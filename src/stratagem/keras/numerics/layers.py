"""Layers of Keras that compute otherwise in a replica: embeddings, max pooling, stateful RNNs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras

from stratagem.errors import explain
from stratagem.execution.lookups import embedding_lookup, is_recorded, note_table
from stratagem.execution.replica_context import ReplicaContext, get_replica_context
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.patches import patches
from stratagem.keras.private import expected_batch_size, with_states
from stratagem.keras.variables.requests import annotated

# Row lookups of embedding layers.
#
# Where `sg.value_and_grad` keeps the gradient of the table as rows, the layer looks them up with
# `embedding_lookup`; everything else goes to Keras.


@patches(keras.layers.Embedding, "build", why="strategies recognize a table before it has a value")
def building_table(original: Callable[..., Any]) -> Any:
    """Returns `Embedding.build` that registers the table."""

    @functools.wraps(original)
    def build(self: keras.layers.Embedding, *args: object, **kwargs: object) -> None:
        with annotated(is_table=True):
            original(self, *args, **kwargs)
        if (table := _table(self)) is not None:
            note_table(table)

    return build


@patches(keras.layers.Embedding, "call", why="the gradient of a table is rows")
def looking_up_rows(original: Callable[..., Any]) -> Any:
    """Returns `Embedding.call` that looks up rows of a recorded table."""

    @functools.wraps(original)
    def call(self: keras.layers.Embedding, inputs: jax.Array) -> Any:
        table = _table(self)
        if table is None or not is_recorded(table):
            return original(self, inputs)
        if inputs.dtype not in ("int32", "int64"):
            inputs = cast("jax.Array", keras.ops.cast(inputs, "int32"))
        return keras.ops.cast(embedding_lookup(table, inputs), self.compute_dtype)

    return call


def _table(layer: keras.layers.Embedding) -> Any:
    """Returns the variable with the embeddings in its rows; None if the layer computes them."""
    if layer.lora_enabled or layer.quantization_mode:
        return None
    table = layer.embeddings
    return table if isinstance(table, keras.Variable) else None


# Max pooling with a fast gradient on CPU.
#
# XLA:CPU computes the gradient of a maximum over windows by select-and-scatter, one element at a
# time: half the time of a small convolutional network. For non-overlapping windows, a comparison
# and a copy give the same gradient, bit for bit. It serves replica functions on CPU devices;
# everything else goes to Keras.


@patches(keras.layers.MaxPooling1D, "call", why="XLA's gradient of max pooling is slow on CPU")
@patches(keras.layers.MaxPooling2D, "call", why="the same")
@patches(keras.layers.MaxPooling3D, "call", why="the same")
def fast_on_cpu(original: Callable[..., Any]) -> Any:
    """Returns `call` of a max-pooling layer with a fast gradient on CPU."""

    @functools.wraps(original)
    def call(self: keras.layers.Layer, inputs: object) -> Any:
        if isinstance(inputs, jax.Array) and _runs_on_cpu() and _fits(self, inputs):
            return max_of_windows(inputs, tuple(self.pool_size))
        return original(self, inputs)

    return call


def _runs_on_cpu() -> bool:
    context = get_replica_context()
    topology = None if context is None else context.strategy.topology
    # The default strategy has no devices and must leave Keras unchanged.
    return topology is not None and topology.devices is not None and topology.platform == "cpu"


def _fits(layer: keras.layers.Layer, inputs: jax.Array) -> bool:
    """Returns True if windows do not overlap and partial windows are dropped."""
    window, shape = tuple(layer.pool_size), inputs.shape[1:-1]
    is_whole = all(size % extent == 0 for size, extent in zip(shape, window, strict=True))
    return (
        jnp.issubdtype(inputs.dtype, jnp.floating)
        and tuple(layer.strides) == window
        and layer.data_format == "channels_last"
        and (is_whole or layer.padding == "valid")
        and all(size >= extent for size, extent in zip(shape, window, strict=True))
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def max_of_windows(inputs: jax.Array, window: Sequence[int]) -> Any:
    """Returns the maximum of each non-overlapping window. Call anywhere.

    `inputs` is a floating array of shape (batch, *spatial, channels); the result has shape
    (batch, *(size // window), channels), so partial windows are dropped. The derivative goes to the
    first maximum of a window, as with `jax.lax.reduce_window`.

    Example:
        >>> max_of_windows(jax.numpy.array([[[1.0], [5.0], [2.0], [3.0]]]), (2,)).ravel()
        Array([5., 3.], dtype=float32)
    """
    extents = (1, *window, 1)
    lowest = jnp.asarray(-jnp.inf, inputs.dtype)
    return jax.lax.reduce_window(inputs, lowest, jax.lax.max, extents, extents, "VALID")


@max_of_windows.defjvp
def _max_of_windows_jvp(
    window: Sequence[int], primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[Any, Any]:
    (inputs,), (tangent,) = primals, tangents
    outputs = max_of_windows(inputs, window)
    place = _place_of_first(inputs, outputs, window)
    whole = tuple(size * extent for size, extent in zip(outputs.shape[1:-1], window, strict=True))
    split: list[int] = [inputs.shape[0]]
    for size, extent in zip(outputs.shape[1:-1], window, strict=True):
        split += [size, extent]
    split.append(inputs.shape[-1])
    within = tuple(range(2, 2 * len(window) + 1, 2))  # axes of positions in a window
    places = jnp.arange(math.prod(window), dtype=place.dtype).reshape(window)
    is_first = jnp.expand_dims(place, within) == jnp.expand_dims(
        places, (0, *range(1, 2 * len(window), 2), 2 * len(window) + 1)
    )
    tangent = jax.lax.slice(
        tangent, (0,) * inputs.ndim, (inputs.shape[0], *whole, inputs.shape[-1])
    )
    chosen = jnp.where(is_first, tangent.reshape(split), jnp.zeros((), tangent.dtype))
    return outputs, jnp.sum(chosen, axis=within)


def _place_of_first(inputs: jax.Array, outputs: jax.Array, window: Sequence[int]) -> Any:
    """Returns the row-major index of the first maximum in each window."""
    count = math.prod(window)
    dtype = jnp.int8 if count <= 127 else jnp.int32
    place = jnp.full(outputs.shape, count - 1, dtype)
    # Backwards, so that the first position of the maximum is written last.
    for index in reversed(range(count - 1)):
        offsets = _offsets(index, window)
        starts = (0, *offsets, 0)
        limits = (
            inputs.shape[0],
            *(
                offset + (size - 1) * extent + 1
                for offset, size, extent in zip(offsets, outputs.shape[1:-1], window, strict=True)
            ),
            inputs.shape[-1],
        )
        here = jax.lax.slice(inputs, starts, limits, (1, *window, 1))
        place = jnp.where(here == outputs, jnp.asarray(index, dtype), place)
    return place


def _offsets(index: int, window: Sequence[int]) -> tuple[int, ...]:
    offsets: list[int] = []
    for extent in reversed(window):
        index, offset = divmod(index, extent)
        offsets.append(offset)
    return tuple(reversed(offsets))


# Stateful RNNs over replicas: the state has the rows of the global batch, as on one device.
#
# Each replica starts with the state rows of its examples; the rows of all replicas are gathered for
# the next batch.


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

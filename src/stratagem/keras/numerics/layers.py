"""Keras layers that compute differently in a replica: embeddings, pooling, RNNs, normalization.

Batch normalization: each replica normalizes with its own statistics, over true examples; with
`synchronized=True` with those of all replicas that train in lockstep. Moving statistics are ON_READ
with MEAN: each replica keeps its own, and reading them outside gives the mean.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import keras

from stratagem import contexts as stack
from stratagem.errors import invalid
from stratagem.execution.lookups import embedding_lookup, is_recorded, note_table
from stratagem.execution.replica_context import ReplicaBatch, ReplicaContext, get_replica_context
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.keras.numerics.step_mode import (
    StepMode,
    example_fraction,
    lockstep_context,
    replica_context,
    step_mode,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    annotate,
    expected_batch_size,
    get_keras_mask,
    get_stateless_scope,
    ids_of_losses,
    reduction_axes,
    set_keras_mask,
    with_states,
)
from stratagem.keras.variables.requests import annotated
from stratagem.options import ReduceOp
from stratagem.resources import changing
from stratagem.variables.registry import is_on_read

if TYPE_CHECKING:
    from jax.typing import ArrayLike


# Rows of a step's batch: masks of true rows, and rows gathered from all replicas.


def true_rows(values: jax.Array, context: ReplicaContext) -> Any:
    """Returns the array with zeros in its padding rows."""
    mask = row_mask(values, context)
    return values if mask is None else jnp.where(mask, values, jnp.zeros((), values.dtype))


def row_mask(values: jax.Array, context: ReplicaContext) -> Any:
    """Returns a mask of true rows that broadcasts against an array.

    Axis 0 of the array is this replica's batch or a multiple of it (as after flattening time). None
    if every row is true or axis 0 is not the batch.
    """
    batch = context.batch
    if not batch.is_padded or values.ndim == 0 or not batch.size or values.shape[0] % batch.size:
        return None
    mask = jnp.repeat(context.example_mask, values.shape[0] // batch.size)
    return mask.reshape((-1,) + (1,) * (values.ndim - 1))


def num_rows(values: ArrayLike, context: ReplicaContext) -> int | None:
    """Returns the size of axis 0 if it is this replica's batch size or a multiple, else None."""
    size, shape = context.batch.size, jnp.shape(values)
    if size is None or not shape:
        return None
    is_batch = shape[0] == size or (size and shape[0] and shape[0] % size == 0)
    return shape[0] if is_batch else None


def first_rows(values: object, count: int, context: ReplicaContext, rows: int | None = None) -> Any:
    """Returns the first `count` examples of a pytree's arrays with `rows` rows; others unchanged.

    `rows` is by default the batch size.
    """
    size = context.batch.size
    rows = size if rows is None else rows
    num_first = count * (rows // size) if rows and size else count

    def cut(leaf: object) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
            return leaf
        return leaf[:num_first] if leaf.shape[0] == rows else leaf

    return _with_masks(cut, values)


def gathered_rows(values: object, context: ReplicaContext, rows: int | None) -> Any:
    """Returns the true rows of all replicas for the arrays with `rows` rows. Differentiable.

    Floating scalars become means weighted by examples. The int batch size, which Keras passes as a
    weight, becomes the global number of examples.
    """
    batch = context.batch
    lengths = batch.lengths if batch.is_padded else None
    if lengths is not None and batch.size and rows is not None:
        lengths = tuple(length * (rows // batch.size) for length in lengths)

    def gathered(leaf: object) -> Any:
        if isinstance(leaf, int) and not isinstance(leaf, bool) and leaf == batch.size:
            return context.global_num_examples
        if not isinstance(leaf, jax.Array):
            return leaf
        if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.floating):
            share = leaf * example_fraction(context, leaf.dtype)
            return context.communicator.all_reduce(ReduceOp.SUM, share)
        if leaf.ndim == 0 or leaf.shape[0] != rows:
            return leaf
        return context.communicator.all_gather(leaf, 0, lengths)

    return _with_masks(gathered, values)


def with_gradient_times(values: object, factor: jax.Array) -> Any:
    """Returns a pytree of arrays as they are, with `factor` times the gradients of floats."""

    def scaled(leaf: object) -> Any:
        if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        return _scaling_gradient(leaf, factor.astype(leaf.dtype))

    return _with_masks(scaled, values)


@jax.custom_vjp
def _scaling_gradient(value: jax.Array, factor: jax.Array) -> jax.Array:
    del factor
    return value


_scaling_gradient.defvjp(
    lambda value, factor: (value, factor),
    lambda factor, gradient: (gradient * factor, jnp.zeros_like(factor)),
)


def _with_masks(change: Callable[[Any], Any], values: object) -> Any:
    """Maps `change` over the leaves of a pytree and over their Keras masks."""

    def changed(leaf: object) -> Any:
        result, mask = change(leaf), get_keras_mask(leaf)
        if mask is not None and result is not leaf:
            set_keras_mask(result, change(mask))
        return result

    return jax.tree.map(changed, values)


def with_known_rows(context: ReplicaContext) -> list[ReplicaContext]:
    """Returns a context for each choice of the rows of a batch; the context itself if known."""
    if not context.batch.choices:
        return [context]
    replica_id, communicator = context.replica_id_in_sync_group, context.communicator
    return [
        ReplicaContext(context.strategy, replica_id, communicator, batch)
        for batch in context.batch.alternatives()
    ]


@contextlib.contextmanager
def whole_batch(context: ReplicaContext) -> Generator[None]:
    """Runs a block as if this replica held all rows of the step, without padding or collectives."""
    batch = ReplicaBatch(size=context.global_num_examples)
    replica_id = context.replica_id_in_sync_group
    whole = ReplicaContext(context.strategy, replica_id, context.communicator, batch)
    with (
        stack.push(stack.FrameKind.REPLICA, context.strategy, whole),
        step_mode(StepMode.WHOLE),
    ):
        yield


_MOVING = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


@patches(
    keras.layers.BatchNormalization,
    "__init__",
    why="synchronized=True, which Keras rejects on JAX",
)
def taking_synchronized(init: Callable[..., Any]) -> Any:
    """Returns `BatchNormalization.__init__` that accepts `synchronized=True`."""

    def replica_init(
        self: keras.layers.BatchNormalization,
        *args: object,
        synchronized: bool = False,
        **kwargs: object,
    ) -> None:
        init(self, *args, **kwargs)
        self.synchronized = bool(synchronized)

    replica_init.__signature__ = inspect.signature(init)  # Read by get_config and clone.
    replica_init.__doc__ = init.__doc__
    return replica_init


@patches(keras.layers.BatchNormalization, "build", why="moving statistics are ON_READ with MEAN")
def annotating_statistics(build: Callable[..., Any]) -> Any:
    """Returns `BatchNormalization.build` whose moving statistics are ON_READ with MEAN."""

    def replica_build(self: keras.layers.BatchNormalization, input_shape: object) -> None:
        add_weight: Callable[..., Any] = self.add_weight

        def add_annotated(*args: object, **kwargs: object) -> Any:
            if kwargs.get("name") not in _MOVING:
                return add_weight(*args, **kwargs)
            with annotated(kind=("on_read", "mean")):
                variable = add_weight(*args, **kwargs)
            annotate(variable, synchronization="on_read", aggregation="mean")
            return variable

        # Replaced on the instance, so that a subclass's add_weight is still called.
        object.__setattr__(self, "add_weight", add_annotated)
        try:
            build(self, input_shape)
        finally:
            object.__delattr__(self, "add_weight")

    return replica_build


@patches(
    keras.layers.BatchNormalization,
    "call",
    why="padding leaves the statistics unchanged; inference uses those of all replicas",
)
def normalizing_true_rows(call: Callable[..., Any]) -> Any:
    """Returns `BatchNormalization.call` that skips padding and infers with all statistics."""

    def replica_call(
        self: keras.layers.BatchNormalization,
        inputs: object,
        training: object = None,
        mask: object = None,
    ) -> Any:
        context = lockstep_context()
        if context is None:
            return call(self, inputs, training=training, mask=mask)
        if not training or not self.trainable:
            with _aggregated_statistics(self, context):
                return call(self, inputs, training=training, mask=mask)
        if not context.batch.is_padded:
            return call(self, inputs, training=training, mask=mask)
        moving = [v for v in (getattr(self, name, None) for name in _MOVING) if v is not None]
        before = [jnp.asarray(variable.value) for variable in moving]
        outputs = call(self, inputs, training=training, mask=mask)
        counted = context.island.global_num_examples if self.synchronized else context.num_examples
        has_examples = counted > 0
        for variable, old in zip(moving, before, strict=True):
            variable.assign(jnp.where(has_examples, variable.value, old))
        return outputs

    return replica_call


@patches(
    keras.layers.BatchNormalization,
    "_moments",
    why="mean and variance over true examples, of all replicas if synchronized",
)
def moments_of_replicas(moments: Callable[..., Any]) -> Any:
    """Returns the method of `BatchNormalization` that computes mean and variance of a batch."""

    def replica_moments(
        self: keras.layers.BatchNormalization, inputs: jax.Array, mask: object
    ) -> Any:
        context = replica_context()
        if context is None or not (self.synchronized or context.batch.is_padded):
            return _plain_moments(moments, self, inputs, mask)
        return _moments_of_true_rows(self, inputs, mask, context.island)

    return replica_moments


@contextlib.contextmanager
def _aggregated_statistics(layer: keras.layers.Layer, context: ReplicaContext) -> Generator[None]:
    """Makes inference use the mean of all replicas' moving statistics, as one device would."""
    variables = (layer.moving_mean, layer.moving_variance)
    outer: Any = get_stateless_scope()
    root = current_scope()
    if root is None or not all(map(is_on_read, variables)):
        yield
        return

    def read(variable: keras.Variable) -> Any:
        value = outer.get_current_value(variable)
        return root.get_current_value(variable) if value is None else value

    both = jnp.stack([jnp.asarray(variable.value) for variable in variables])
    mean, variance = context.communicator.all_reduce(ReduceOp.MEAN, both)
    scope = ReplicaScope(read)
    scope.set_value(layer.moving_mean, mean)
    scope.set_value(layer.moving_variance, variance)
    with scope:
        yield


def _plain_moments(
    moments: Callable[..., Any],
    layer: keras.layers.BatchNormalization,
    inputs: object,
    mask: object,
) -> Any:
    with changing(layer, synchronized=False):  # Keras on JAX rejects True
        return moments(layer, inputs, mask)


def _moments_of_true_rows(
    layer: keras.layers.BatchNormalization, inputs: jax.Array, mask: object, context: ReplicaContext
) -> Any:
    """Returns mean and variance over true positions, of all replicas if synchronized."""
    weights = jnp.ones((inputs.shape[0],) + (1,) * (inputs.ndim - 1), inputs.dtype)
    rows = row_mask(inputs, context)
    if rows is not None:
        weights = weights * rows.astype(inputs.dtype)
    if mask is not None:
        weights = weights * jnp.asarray(mask, inputs.dtype)[..., None]
    axes = reduction_axes(layer)
    inputs = jnp.where(weights > 0, inputs, 0)

    def total(values: jax.Array) -> Any:
        local = jnp.sum(values, axis=axes)
        return context.communicator.all_reduce(ReduceOp.SUM, local) if layer.synchronized else local

    shape = [1] * inputs.ndim
    shape[layer.axis] = inputs.shape[layer.axis]
    count = jnp.maximum(total(jnp.broadcast_to(weights, inputs.shape)), 1.0)
    mean = total(inputs * weights) / count
    variance = total(jnp.square(inputs - mean.reshape(shape)) * weights) / count
    return mean, variance


# Row lookups of embedding layers.
#
# Where `sg.value_and_grad` keeps the gradient of the table as rows, the layer looks them up with
# `embedding_lookup`; everything else goes to Keras.


@patches(
    keras.layers.Layer,
    "_clear_losses",
    why="an eager replica goes on with its own losses after others have called the layer",
)
def noting_losses(original: Callable[..., Any]) -> Any:
    """Returns `Layer._clear_losses`, which also notes what layers an eager replica calls."""

    @functools.wraps(original)
    def clear(self: keras.layers.Layer) -> None:
        original(self)
        scope = current_scope()
        if scope is not None and scope.outermost.replica is not None:
            scope.outermost.ids_of_losses[id(self)] = ids_of_losses(self)

    return clear


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
        raise invalid(
            f"{strategy} cannot run the stateful RNN {layer.name!r}.",
            expected="layers without per-example state: each worker reads a different batch, "
            "but servers store a single state.",
            fix="remove stateful=True, or use sg.MirroredStrategy.",
        )
    raise invalid(
        f"The stateful RNN {layer.name!r} has state for {expected} examples, but {strategy} "
        f"passed it {received} in {context.num_replicas_in_sync} replicas.",
        expected="an Input whose batch size is the global batch size.",
        fix=f"batch the data by {expected} and drop a shorter last batch, or build the model "
        f"with keras.Input(batch_shape=({received}, ...)).",
    )

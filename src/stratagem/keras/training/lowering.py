"""Lowering of a model's training step from shapes, without the actual devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.placement import PlacedBatches
from stratagem.keras.private.trainers import build_for
from stratagem.keras.training.model import strategy_of
from stratagem.keras.training.replica_steps import ReplicaSteps
from stratagem.messages import explain

if TYPE_CHECKING:
    import keras


def lower_training_step(model: keras.Model, batch: Sequence[object], *, num_steps: int = 1) -> Any:
    """Lowers a model's training step for its strategy's devices, from shapes alone.

    Under a `CompileOnlyStrategy` no device is needed. Nothing is computed or transferred.

    Args:
        model: a compiled Keras model that belongs to a strategy.
        batch: `(x,)`, `(x, y)` or `(x, y, sample_weight)` of arrays or `jax.ShapeDtypeStruct`s, of
            the global batch size.
        num_steps: steps per call, as `steps_per_execution`.

    Returns:
        The result of `jax.jit(...).lower`. Its `.compile()` returns the program, whose `as_text()`,
        `memory_analysis()` and `cost_analysis()` describe one device.

    Raises:
        ValueError: the model has no strategy, or the batch size is not a multiple of the replicas.

    Source: JAX, ahead-of-time lowering and compilation.
    """
    strategy = strategy_of(model)
    if strategy is None:
        raise ValueError(
            explain(
                f"Model {model.name!r} belongs to no strategy.",
                expected="a model created in the scope of the strategy to lower it for.",
                fix="create it in `with strategy.scope():`, or call sg.compile(model, "
                "distribute=strategy, ...).",
            )
        )
    shapes = jax.tree.map(_shape_of, tuple(batch))
    arguments = batch_arguments(_split(shapes, strategy.num_replicas_in_sync))
    with strategy.scope():
        build_for(model, shapes)
        return strategy.executor.lower(
            ReplicaSteps(model).train, arguments, strategy.topology, num_steps
        )


def _shape_of(array: object) -> jax.ShapeDtypeStruct:
    if not isinstance(array, jax.ShapeDtypeStruct | jax.Array):
        array = np.asarray(array)
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))


def _split(shapes: object, num_replicas: int) -> PlacedBatches:
    """Returns the shapes of a batch on the devices, with equal parts for all replicas."""
    leaves, structure = jax.tree.flatten(shapes, is_leaf=lambda leaf: leaf is None)
    arrays = [leaf for leaf in leaves if leaf is not None]
    sizes = {array.shape[0] if array.shape else 0 for array in arrays}
    total = min(sizes, default=0)
    if len(sizes) != 1 or total % num_replicas or not total:
        raise ValueError(
            explain(
                f"The batch has arrays of shapes {[array.shape for array in arrays]}, which do "
                f"not split evenly over {num_replicas} replicas.",
                expected="arrays of the same leading size, a multiple of the replicas.",
                fix="choose a batch size that is a multiple of the number of replicas.",
                code="SG306",
            )
        )
    size = total // num_replicas
    rows = (num_replicas, size) if num_replicas > 1 else (size,)
    return PlacedBatches(
        structure=structure,
        is_array=tuple(leaf is not None for leaf in leaves),
        arrays=[jax.ShapeDtypeStruct((*rows, *a.shape[1:]), a.dtype) for a in arrays],
        num_replicas=num_replicas,
        num_steps=1,
        size=size,
        lengths=None,
        local_lengths=(size,) * num_replicas,
        signature=None,
    )

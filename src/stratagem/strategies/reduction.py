"""Reduction and gathering over the parts of a value, outside a step and inside merge_call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem import contexts as stack
from stratagem.devices.lockstep import compute_on_every_process, is_multi_process
from stratagem.devices.mesh import outside_context_mesh, start_lock
from stratagem.errors import InvalidArgumentError, explain, invalid
from stratagem.execution.replica_context import (
    check_axis,
    check_equal_shapes,
    check_not_slices,
    is_key,
    random_keys_error,
)
from stratagem.group.current import current_group
from stratagem.options import ReduceOp
from stratagem.variables.components import mean_of_components
from stratagem.variables.distributed import (
    DistributedValues,
    IndexedSlices,
    PerReplica,
    is_array,
    without_mirrored,
)


def is_leaf(value: object) -> bool:
    """Returns True if a value is reduced or gathered as a whole."""
    return isinstance(value, DistributedValues | IndexedSlices)


def parse_axes(axis: int | tuple[int, ...] | list[int] | None) -> tuple[int, ...] | None:
    """Returns the array axes to reduce over, or None for the replicas only.

    Raises:
        TypeError: `axis` is not None, an int, or a tuple or list of ints.
    """
    if axis is None:
        return None
    axes = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    if any(not isinstance(one, int) or isinstance(one, bool) for one in axes):
        raise TypeError(
            explain(
                f"reduce received axis={axis!r}.",
                expected="None, an int, or a tuple or list of ints.",
                fix="pass axis=None to reduce over replicas only, or axis=0 for the examples as "
                "well.",
            )
        )
    return axes


@outside_context_mesh
def reduce(op: ReduceOp, value: object, axes: tuple[int, ...] | None, *, num_replicas: int) -> Any:
    """Reduces one leaf over replicas and, if given, over array axes.

    Args:
        op: SUM or MEAN.
        value: `PerReplica`, `Mirrored`, array, number, or `IndexedSlices` of these.
        axes: array axes of one component to reduce over as well.
        num_replicas: number of replicas.

    Returns:
        An array, or `IndexedSlices` of arrays.

    Raises:
        ValueError: a SUM of a plain value over several replicas; a bad axis.
        InvalidArgumentError: parts of unequal shapes.
        NotImplementedError: `IndexedSlices` with axes.
    """
    if isinstance(value, IndexedSlices):
        if axes is not None:
            check_not_slices(value, f"reduce with axis={axes}")
        return _reduce_slices(op, value, num_replicas)
    _check_numbers(value)
    if isinstance(value, PerReplica):
        return _reduce_per_replica(op, value, axes, num_replicas)
    plain = without_mirrored(value)
    _check_contribution(op, plain, num_replicas)
    if axes is not None and is_key(plain):
        raise random_keys_error("reduce")
    return jnp.asarray(plain) if axes is None else _reduce_parts(op, [plain], axes)


def _check_numbers(value: object) -> None:
    """Raises TypeError for strings and other objects, which have no sum."""
    parts = (value.objects or ()) if isinstance(value, PerReplica) else (value,)
    for part in parts:
        if isinstance(part, str | bytes) or (isinstance(part, np.ndarray) and not is_array(part)):
            raise TypeError(
                explain(
                    f"reduce received {part!r}.",
                    expected="numbers, which have a sum and a mean.",
                    fix="leave it out, and read it with strategy.local_results.",
                    code="SG904",
                )
            )


def _reduce_per_replica(
    op: ReduceOp, value: PerReplica, axes: tuple[int, ...] | None, num_replicas: int
) -> Any:
    if is_key(value.local) or is_key(value.stacked):
        return _same_key(op, value, axes, num_replicas)
    if value.local is not None:
        return _reduce_local(op, value.local, axes)
    if axes is None and value.lengths is None and value.stacked is not None:
        if is_multi_process(value.stacked):
            return compute_on_every_process(value.stacked, _mean if op is ReduceOp.MEAN else _sum)
        with start_lock:
            combined = _combine(op, value.stacked)
        return _one_copy(combined)
    return _reduce_parts(op, list(of_all(value, num_replicas).components), axes)


def _same_key(op: ReduceOp, keys: PerReplica, axes: object, num_replicas: int) -> Any:
    """Returns the mean of random keys: one replica's, if all have the same."""
    if op is ReduceOp.MEAN and axes is None and keys.stacked is not None and not keys.lengths:
        parts = of_all(_key_data(keys), num_replicas).components
        first, *others = [np.asarray(part) for part in parts]
        if all(np.array_equal(first, other) for other in others):
            return jax.random.wrap_key_data(
                jnp.asarray(first), impl=jax.random.key_impl(keys.stacked)
            )
    raise random_keys_error("reduce")


def _key_data(keys: PerReplica) -> PerReplica:
    return PerReplica(stacked=jax.random.key_data(keys.stacked), lengths=keys.lengths)


def _check_contribution(op: ReduceOp, plain: object, num_replicas: int) -> None:
    if num_replicas > 1 and op is ReduceOp.SUM:
        fix = 'pass the result of `run`; or use "mean", which leaves a plain value unchanged.'
        if isinstance(plain, int | float | complex):
            fix = (
                "return an array from the step, such as jnp.asarray(number): a Python number is "
                "part of the program, the same on all replicas. To count examples, return "
                "jnp.asarray(sg.get_replica_context().num_examples), since len() and .shape count "
                'padding. Or use "mean", which leaves a plain value unchanged.'
            )
        raise invalid(
            f"reduce received a plain value {plain!r} to SUM over {num_replicas} replicas.",
            expected="a PerReplica, as `run` returns it for an array: a plain value may be one "
            "contribution, or one per replica.",
            fix=fix,
            code="SG407",
        )


def _reduce_slices(op: ReduceOp, slices: IndexedSlices, num_replicas: int) -> IndexedSlices:
    values, indices = slices.values, slices.indices
    if not isinstance(values, PerReplica):
        _check_contribution(op, slices, num_replicas)
        return slices.combined()
    if values.local is not None:
        local = IndexedSlices(values.local, indices.local, slices.dense_shape)
        return merge_context().communicator.all_reduce_slices(op, local).combined()
    rows = jnp.concatenate([movable(part) for part in of_all(values, num_replicas).components])
    places = jnp.concatenate([movable(part) for part in of_all(indices, num_replicas).components])
    if op is ReduceOp.MEAN:
        rows = rows / num_replicas
    return IndexedSlices(rows, places, slices.dense_shape).combined()


def of_all(value: PerReplica, num_replicas: int) -> PerReplica:
    """Returns a value with the parts of all processes; all of them must call this.

    Args:
        value: a value outside a step.
        num_replicas: number of replicas.
    """
    if value.stacked is not None:
        if not is_multi_process(value.stacked):
            return value
        return PerReplica(stacked=compute_on_every_process(value.stacked), lengths=value.lengths)
    group = current_group()
    if value.objects is None or len(value.objects) == num_replicas or group is None:
        return value
    own = [np.asarray(part) for part in value.objects]
    received = group.exchange("parts of unlike shapes", own)
    parts = [part for parts in received for part in parts]
    # Several processes may have one replica together.
    return PerReplica(objects=tuple(parts[:: len(parts) // num_replicas]))


def _mean(stacked: jax.Array | np.ndarray) -> Any:
    return _combine(ReduceOp.MEAN, stacked)


def _sum(stacked: jax.Array | np.ndarray) -> Any:
    return _combine(ReduceOp.SUM, stacked)


def _combine(op: ReduceOp, stacked: jax.Array | np.ndarray) -> Any:
    return (
        mean_of_components(stacked)
        if op is ReduceOp.MEAN
        else jnp.sum(stacked, axis=0, dtype=_sum_dtype(stacked))
    )


def _sum_dtype(value: jax.Array | np.ndarray) -> Any:
    return jnp.int32 if value.dtype == bool else value.dtype


def _one_copy(value: jax.Array) -> Any:
    """Returns one device's copy of a result that is the same on all, as an ordinary array."""
    if isinstance(value, Tracer) or len(value.sharding.device_set) == 1:
        return value
    return (
        value.addressable_data(0) if value.is_fully_replicated else jnp.asarray(np.asarray(value))
    )


def _reduce_parts(op: ReduceOp, parts: list[Any], axes: tuple[int, ...] | None) -> Any:
    arrays = [jnp.asarray(movable(part)) for part in parts]
    if axes is None:
        check_equal_shapes([part.shape for part in arrays], "reduce with axis=None")
        return _combine(op, jnp.stack(arrays))
    sums: list[Any] = []
    count = 0
    for part in arrays:
        over = tuple(check_axis(axis, part.ndim, "reduce") for axis in axes)
        sums.append(jnp.sum(part, axis=over, dtype=_sum_dtype(part)))
        count += int(np.prod([part.shape[axis] for axis in over]))
    check_equal_shapes([part.shape for part in sums], f"reduce with axis={axes}")
    total = jnp.sum(jnp.stack(sums), axis=0, dtype=sums[0].dtype)
    return total / count if op is ReduceOp.MEAN else total


def _reduce_local(op: ReduceOp, local: jax.Array | np.ndarray, axes: tuple[int, ...] | None) -> Any:
    """Reduces while a step is traced: this replica's part is an array, the others are remote."""
    context = merge_context()
    local = jnp.asarray(local)
    batch = context.batch
    padded = batch.is_padded and local.ndim > 0 and local.shape[0] == batch.size
    if axes is None:
        if padded and len(set(batch.lengths)) > 1:
            raise InvalidArgumentError(
                explain(
                    f"reduce with axis=None received parts of {batch.lengths} rows.",
                    expected="as many rows on every replica.",
                    fix="reduce over axis 0 as well (axis=0), which counts true rows.",
                    code="SG408",
                )
            )
        return context.communicator.all_reduce(op, local)
    over = tuple(check_axis(axis, local.ndim, "reduce") for axis in axes)
    count: Any = int(np.prod([local.shape[axis] for axis in over])) * context.num_replicas_in_sync
    if padded and 0 in over:
        mask = context.example_mask.reshape((-1,) + (1,) * (local.ndim - 1))
        local = jnp.where(mask, local, 0)
        count = count // (batch.size * context.num_replicas_in_sync) * context.global_num_examples
    total = context.communicator.all_reduce(
        ReduceOp.SUM, jnp.sum(local, axis=over, dtype=_sum_dtype(local))
    )
    return total / count if op is ReduceOp.MEAN else total


def merge_context() -> Any:
    """Returns the replica context of the step that is being traced.

    Raises:
        ValueError: no step is being traced.
    """
    frame = stack.current_frame()
    if frame is None or frame.replica is None:
        raise invalid(
            "A PerReplica of a compiled step was used outside merge_call.",
            expected="use in the function given to merge_call.",
            fix="return the value from the replica function and reduce what `run` returns.",
            code="SG206",
        )
    return frame.replica


@outside_context_mesh
def gather(value: object, axis: object, *, num_replicas: int) -> Any:
    """Concatenates the parts of one leaf in replica order, true rows only.

    Args:
        value: `PerReplica`, `Mirrored`, array or number.
        axis: array axis of one component.
        num_replicas: number of replicas.

    Returns:
        An array; a plain value unchanged.

    Raises:
        ValueError: rank 0 or bad axis.
        InvalidArgumentError: parts whose other sizes differ.
        NotImplementedError: `IndexedSlices`.
    """
    check_not_slices(value, "gather")
    if not isinstance(value, PerReplica):
        return without_mirrored(value)
    if value.local is not None:
        context = merge_context()
        local = jnp.asarray(value.local)
        axis = check_axis(axis, local.ndim, "gather")
        padded = axis == 0 and context.batch.is_padded and local.shape[0] == context.batch.size
        return context.communicator.all_gather(
            local, axis, context.batch.lengths if padded else None
        )
    if is_key(value.stacked):
        axis = check_axis(axis, value.stacked.ndim - 1, "gather")
        data = gather(_key_data(value), axis, num_replicas=num_replicas)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value.stacked))
    parts = [movable(part) for part in of_all(value, num_replicas).components]
    axes = [check_axis(axis, part.ndim, "gather") for part in parts]
    check_equal_shapes(
        [part.shape[:one] + part.shape[one + 1 :] for part, one in zip(parts, axes, strict=True)],
        f"gather along axis {axis} (which is left out here)",
    )
    if not all(map(is_array, parts)):  # strings
        return np.concatenate(parts, axis=axes[0])
    return jnp.concatenate(parts, axis=axes[0])


def movable(part: object) -> Any:
    """Returns an array as NumPy, so that it combines with other devices' arrays.

    A traced array is unchanged.
    """
    return part if isinstance(part, Tracer) else np.asarray(part)

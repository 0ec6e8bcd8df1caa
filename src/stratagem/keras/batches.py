"""Host batches split over replicas: one per-replica size, true lengths beside, steps stacked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from stratagem.context import ReplicaBatch
from stratagem.execution.arguments import Arguments, Leaf, Static
from stratagem.messages import explain
from stratagem.topology import Topology

__all__ = ["HostBatch", "place", "split_lengths", "take_batch"]


def split_lengths(num_examples: int, num_replicas: int) -> tuple[int, tuple[int, ...] | None]:
    """Shares examples among replicas: each takes the next ceil(B / n) until they are used up.

    Args:
        num_examples: B, at least 1.
        num_replicas: n.

    Returns:
        The per-replica size, and the true sizes in replica order, None if all are equal to it.

    Source: TF 2.21 input_lib.py and data/experimental/ops/distribute.py, _RebatchDataset.
    """
    size = -(-num_examples // num_replicas)
    if size * num_replicas == num_examples:
        return size, None
    return size, tuple(min(size, max(0, num_examples - i * size)) for i in range(num_replicas))


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """One batch on the host, and how it is split.

    Args:
        structure: pytree structure of the batch, None leaves included.
        arrays: its arrays, each of shape (B, ...).
        is_array: for each leaf whether it is an array (else None).
        num_examples: B.
        signature: what makes two batches run in one program: structure, shapes and dtypes.
    """

    structure: Any
    arrays: list[np.ndarray[Any, Any]]
    is_array: tuple[bool, ...]
    num_examples: int
    signature: Any


def take_batch(data: Any) -> HostBatch:
    """Looks at a batch as a data adapter yields it.

    Args:
        data: pytree of arrays of shape (B, ...) and None.

    Returns:
        The batch.

    Raises:
        ValueError: an array without a batch axis, or leaves of different leading sizes.
    """
    leaves, structure = jax.tree.flatten(data, is_leaf=lambda leaf: leaf is None)
    arrays = [np.asarray(leaf) for leaf in leaves if leaf is not None]
    sizes = {array.shape[0] if array.ndim else None for array in arrays}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            explain(
                f"A batch has arrays of the shapes {[array.shape for array in arrays]}.",
                expected="batched arrays, all with the same leading size.",
                fix="batch the data: dataset.batch(n), or yield arrays with a leading batch axis.",
            )
        )
    is_array = tuple(leaf is not None for leaf in leaves)
    signature = (structure, is_array, tuple((array.shape, array.dtype) for array in arrays))
    return HostBatch(structure, arrays, is_array, arrays[0].shape[0], signature)


def place(batches: list[HostBatch], topology: Topology) -> Arguments:
    """Moves batches of one signature to the devices, in one transfer an array.

    Args:
        batches: one or more.
        topology: the devices.

    Returns:
        Arguments of a function of one batch. With one batch, split arrays of shape (n, rows, ...);
        with several of (steps, n, rows, ...); without the n where there is one replica.
    """
    first = batches[0]
    count = topology.num_replicas
    size, lengths = split_lengths(first.num_examples, count)
    split: list[Any] = []
    shapes: list[tuple[int, ...]] = []
    for index in range(len(first.arrays)):
        parts = [_rows(batch.arrays[index], size * count) for batch in batches]
        joined = parts[0] if len(parts) == 1 else np.stack(parts)
        rows = first.arrays[index].shape[1:]
        step_shape = (count, size, *rows) if count > 1 else (size, *rows)
        joined = joined.reshape(step_shape if len(parts) == 1 else (len(parts), *step_shape))
        split.append(_put(joined, topology, many=len(parts) > 1))
        shapes.append(step_shape)
    remaining = iter(zip(shapes, split, strict=True))
    leaves: list[Leaf] = []
    for is_array in first.is_array:
        if is_array:
            shape, array = next(remaining)
            leaves.append(Leaf(split=True, shape=shape, dtype=array.dtype, lengths=lengths))
        else:
            leaves.append(Leaf(split=False, static=Static(None)))
    return Arguments(
        _wrap(first.structure), tuple(leaves), split, [], ReplicaBatch(size=size, lengths=lengths)
    )


def _wrap(structure: Any) -> Any:
    """Returns the structure of `((batch,), {})`."""
    batch = jax.tree.unflatten(structure, [0] * structure.num_leaves)
    return jax.tree.structure(((batch,), {}))


def _rows(array: np.ndarray[Any, Any], num_rows: int) -> np.ndarray[Any, Any]:
    """Repeats the last example up to a number of rows: true data, so that nothing overflows."""
    missing = num_rows - array.shape[0]
    if not missing:
        return array
    return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])


def _put(array: np.ndarray[Any, Any], topology: Topology, *, many: bool) -> jax.Array:
    if topology.num_replicas == 1:
        return topology.replicate(array)
    return jax.device_put(array, topology.stacked_steps if many else topology.stacked)

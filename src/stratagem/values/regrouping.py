"""From one structure a replica to one structure of PerReplica, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem.messages import explain
from stratagem.topology import Topology
from stratagem.values.distributed import DistributedValues, Mirrored, PerReplica

__all__ = ["is_array", "is_per_replica", "regroup", "select_replica"]


def is_per_replica(value: Any) -> bool:
    """Tells whether a value is a `PerReplica` (for use as `is_leaf`)."""
    return isinstance(value, PerReplica)


def is_array(value: Any) -> bool:
    """Tells whether a value is an array or a NumPy scalar, of numbers: what JAX can hold."""
    if isinstance(value, jax.Array):
        return True
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSUMm"


def select_replica(replica_id: int, value: Any) -> Any:
    """Returns the part of a structure that one replica sees.

    Args:
        replica_id: 0 <= replica_id < number of components.
        value: pytree with `PerReplica` leaves; other leaves are the same for all replicas.

    Returns:
        The same pytree with plain leaves.

    Raises:
        IndexError: no such replica.

    Source: TF 2.21 distribute_utils.py, select_replica.
    """

    def select(leaf: Any) -> Any:
        if isinstance(leaf, Mirrored):
            return leaf.value
        if not isinstance(leaf, PerReplica):
            return leaf
        components = leaf.components
        if not 0 <= replica_id < len(components):
            raise IndexError(
                explain(
                    f"replica_id={replica_id} names no replica.",
                    expected=f"0 <= replica_id < {len(components)}.",
                    fix="pass the id of an existing replica.",
                )
            )
        return components[replica_id]

    return jax.tree.map(select, value, is_leaf=_is_distributed)


def _is_distributed(value: Any) -> bool:
    return isinstance(value, DistributedValues)


def regroup(values: Sequence[Any], topology: Topology | None = None) -> Any:
    """Returns one structure of `PerReplica` from one structure a replica.

    A Python object that is equal on all replicas comes back as it is; with one replica, everything
    does.

    Args:
        values: one pytree a replica, in replica order, all of one structure.
        topology: the devices that the components belong on; None joins them on JAX's default
            device, from where `Strategy.run` moves them.

    Returns:
        That structure; arrays are stacked along a new leading replica axis. Components that differ
        in their leading size are padded by repeating their last row, with the true sizes beside.

    Raises:
        ValueError: the structures differ, and the message names where; or no values at all.

    Example:
        >>> sg.regroup([{"a": 1.0}, {"a": 2.0}])
        {'a': PerReplica[1.0 | 2.0]}

    Source: TF 2.21 distribute_utils.py, regroup.
    """
    if not values:
        raise ValueError(
            explain(
                "regroup received no values.",
                expected="one structure a replica.",
                fix="pass a list with as many structures as there are replicas.",
            )
        )
    if len(values) == 1:
        return values[0]
    topology = topology or Topology(None)
    flat = [
        jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_distributed) for value in values
    ]
    for index, (leaves, structure) in enumerate(flat):
        if structure != flat[0][1]:
            raise ValueError(
                explain(
                    f"Replica {index} has the structure {structure}, which differs "
                    f"{_first_difference(flat[0][0], leaves)} from replica 0's {flat[0][1]}.",
                    expected="the same structure on every replica.",
                    fix="return the same keys and lengths on every replica.",
                )
            )
    columns = zip(*([leaf for _, leaf in leaves] for leaves, _ in flat), strict=True)
    return jax.tree.unflatten(
        flat[0][1], [_regroup_leaf(list(column), topology) for column in columns]
    )


def _first_difference(expected: list[Any], received: list[Any]) -> str:
    for (path, _), (other, _) in zip(expected, received, strict=False):
        if path != other:
            return f"at `{jax.tree_util.keystr(other)}`"
    longer = expected if len(expected) > len(received) else received
    position = min(len(expected), len(received))
    if position == len(longer):
        return "in the type of a container"
    return f"at `{jax.tree_util.keystr(longer[position][0])}`"


def _regroup_leaf(column: list[Any], topology: Topology) -> Any:
    first = column[0]
    if not is_array(first) and all(leaf is first for leaf in column):
        return first
    if not any(is_array(leaf) for leaf in column) and _all_equal(column):
        return first
    if all(isinstance(leaf, bool | int | float | complex) or is_array(leaf) for leaf in column):
        joined = _stack(
            [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in column], topology
        )
        if joined is not None:
            return joined
    return PerReplica(objects=tuple(column))


def _all_equal(column: list[Any]) -> bool:
    first = column[0]
    if isinstance(first, np.ndarray):  # of texts, dates or objects
        return all(np.array_equal(first, leaf) for leaf in column)
    return all(type(leaf) is type(first) and bool(leaf == first) for leaf in column)


def _stack(column: list[Any], topology: Topology) -> PerReplica | None:
    """Joins arrays that differ in their leading size at most; None if they differ in more."""
    shapes = {leaf.shape for leaf in column}
    if len({leaf.dtype for leaf in column}) > 1 or len({len(shape) for shape in shapes}) > 1:
        return None
    if len(shapes) == 1:
        return PerReplica(stacked=topology.stack([_canonical(leaf) for leaf in column]))
    if len({shape[1:] for shape in shapes}) > 1:
        return None
    lengths = tuple(leaf.shape[0] for leaf in column)
    padded = [_pad_rows(leaf, max(lengths), column) for leaf in column]
    return PerReplica(stacked=topology.stack(padded), lengths=lengths)


def _canonical(leaf: Any) -> Any:
    """Gives NumPy values the dtype that JAX would give them (float64 becomes float32)."""
    if isinstance(leaf, jax.Array):
        return leaf
    return np.asarray(leaf, jax.dtypes.canonicalize_dtype(leaf.dtype))


def _pad_rows(leaf: Any, num_rows: int, column: list[Any]) -> Any:
    """Repeats a true row, so that arithmetic on the padding cannot overflow."""
    missing = num_rows - leaf.shape[0]
    if not missing:
        return _canonical(leaf)
    source = leaf if leaf.shape[0] else next(other for other in column if other.shape[0])
    filler = np.repeat(np.asarray(source[-1:]), missing, axis=0)
    return _canonical(np.concatenate([np.asarray(leaf), filler], axis=0))

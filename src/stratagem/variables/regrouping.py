"""`regroup` and `select_replica`: conversion between one structure per replica and `PerReplica`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem.devices.exact_integers import require_exact_integers
from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.group.current import current_group
from stratagem.variables.distributed import DistributedValues, Mirrored, PerReplica


def is_per_replica(value: object) -> bool:
    """Returns True for a `PerReplica`; for use as `is_leaf`."""
    return isinstance(value, PerReplica)


def is_array(value: object) -> bool:
    """Returns True for a JAX array, or a NumPy array or scalar of a dtype that JAX supports."""
    if isinstance(value, jax.Array):
        return True
    return isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OSUMm"


def select_replica(replica_id: int, value: object) -> Any:
    """Returns the part of a structure that one replica sees.

    Args:
        replica_id: int, 0 <= replica_id < number of components.
        value: pytree with `PerReplica` leaves; other leaves are the same for all replicas.

    Returns:
        The same pytree with plain leaves.

    Raises:
        IndexError: `replica_id` is out of range.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group + 1)
        >>> int(sg.select_replica(1, {"id": values, "name": "a"})["id"])
        2

    Source: TF 2.21 distribute_utils.py, select_replica.
    """

    def select(leaf: object) -> Any:
        if isinstance(leaf, Mirrored):
            return leaf.value
        if not isinstance(leaf, PerReplica):
            return leaf
        components = leaf.components
        if not 0 <= replica_id < len(components):
            raise IndexError(
                explain(
                    f"replica_id={replica_id} is out of range.",
                    expected=f"0 <= replica_id < {len(components)}.",
                    fix="pass the id of an existing replica.",
                )
            )
        return components[replica_id]

    return jax.tree.map(select, value, is_leaf=_is_distributed)


def _is_distributed(value: object) -> bool:
    return isinstance(value, DistributedValues)


def regroup(values: Sequence[Any], topology: Topology | None = None) -> Any:
    """Combines one structure per replica into one structure of `PerReplica`.

    With one replica, its structure is returned unchanged. Python objects that are equal on all
    replicas are also returned unchanged.

    Args:
        values: one pytree per replica of this process, in replica order, all of the same structure.
        topology: devices of the components; None stacks them on JAX's default device, from which
            `Strategy.run` moves them.

    Returns:
        The same structure; arrays are stacked along a new leading replica axis. Components that
        differ in their leading size are padded by repeating the last row, and keep their true sizes
        in `lengths`.

    Raises:
        ValueError: no values, or structures that differ; the message names the first difference.

    Example:
        >>> sg.regroup([{"a": 1.0}, {"a": 2.0}])
        {'a': PerReplica[1.0 | 2.0]}

    Source: TF 2.21 distribute_utils.py, regroup.
    """
    if not values:
        raise ValueError(
            explain(
                "regroup received no values.",
                expected="one structure per replica.",
                fix="pass a list with one structure per replica.",
            )
        )
    spans = topology is not None and topology.spans_processes
    if len(values) == 1 and (topology is None or topology.num_replicas == 1):
        return values[0]
    return _regroup_leaves(values, topology or Topology(None), spans=spans)


def _regroup_leaves(values: Sequence[Any], topology: Topology, *, spans: bool) -> Any:
    """Regroups each leaf; `spans` is True if other processes have replicas, too."""
    flat = [
        jax.tree_util.tree_flatten_with_path(value, is_leaf=_is_distributed) for value in values
    ]
    error = _difference_in_structure(flat)
    paths = [jax.tree_util.keystr(path) for path, _ in flat[0][0]]
    if error is not None and not spans:
        raise error
    columns: list[list[Any]] = []
    if error is None:
        parts = ([leaf for _, leaf in leaves] for leaves, _ in flat)
        columns = [list(column) for column in zip(*parts, strict=True)]
    firsts = [processes[0] for processes in topology.processes_of_inputs]
    properties = (
        _exchange_properties(paths, columns, error, firsts)
        if spans
        else [_LeafProperties.of(c) for c in columns]
    )
    return jax.tree.unflatten(
        flat[0][1],
        [
            _regroup_leaf(column, leaf_properties, topology)
            for column, leaf_properties in zip(columns, properties, strict=True)
        ],
    )


def _difference_in_structure(flat: list[Any]) -> ValueError | None:
    for index, (leaves, structure) in enumerate(flat):
        if structure != flat[0][1]:
            return ValueError(
                explain(
                    f"Replica {index} has the structure {structure}, which differs "
                    f"{_first_difference(flat[0][0], leaves)} from replica 0's {flat[0][1]}.",
                    expected="the same structure on every replica.",
                    fix="return the same keys and lengths on every replica.",
                )
            )
    return None


def _first_difference(expected: list[Any], received: list[Any]) -> str:
    for (path, _), (other, _) in zip(expected, received, strict=False):
        if path != other:
            return f"at `{jax.tree_util.keystr(other)}`"
    longer = expected if len(expected) > len(received) else received
    position = min(len(expected), len(received))
    if position == len(longer):
        return "in the type of a container"
    return f"at `{jax.tree_util.keystr(longer[position][0])}`"


@dataclasses.dataclass(frozen=True)
class _LeafProperties:
    """Properties of one leaf on all replicas.

    `is_one` is True if all parts are equal Python objects. `shapes` are in replica order, or None
    if some parts are neither arrays nor numbers.
    """

    is_one: bool
    shapes: tuple[tuple[int, ...], ...] | None = None
    dtypes: tuple[str, ...] = ()

    @classmethod
    def of(cls, column: list[Any]) -> _LeafProperties:
        is_one = not any(is_array(leaf) for leaf in column) and (
            all(leaf is column[0] for leaf in column) or _all_equal(column)
        )
        if not all(isinstance(x, bool | int | float | complex) or is_array(x) for x in column):
            return cls(is_one)
        shapes = tuple(np.shape(leaf) for leaf in column)
        return cls(is_one, shapes, tuple(str(_to_canonical_dtype(leaf).dtype) for leaf in column))

    @property
    def lengths(self) -> tuple[int, ...] | None:
        """Leading sizes if they differ, otherwise None."""
        assert self.shapes is not None
        if len(set(self.shapes)) == 1:
            return None
        return tuple(shape[0] for shape in self.shapes)

    @property
    def can_join(self) -> bool:
        """True if the parts differ at most in their leading size."""
        if self.shapes is None or len(set(self.dtypes)) > 1:
            return False
        if len(set(self.shapes)) == 1:
            return True
        is_rank_alike = len({len(shape) for shape in self.shapes}) == 1 and self.shapes[0]
        return bool(is_rank_alike) and len({shape[1:] for shape in self.shapes}) == 1


def _exchange_properties(
    paths: list[str], columns: list[list[Any]], error: ValueError | None, firsts: Sequence[int]
) -> list[_LeafProperties]:
    """Returns the properties of the leaves on all processes, which must agree.

    `firsts` are processes that together have each replica once, in replica order.
    An error on one process is raised on all, since the others would wait for it.
    """
    group = current_group()
    assert group is not None
    own = [_LeafProperties.of(column) for column in columns]
    own_report = (
        paths,
        [
            (
                leaf_properties.is_one,
                _comparable(column[0]),
                leaf_properties.shapes,
                leaf_properties.dtypes,
            )
            for leaf_properties, column in zip(own, columns, strict=True)
        ],
        None if error is None else str(error),
    )
    all_reports = group.exchange("the parts of a distributed value", own_report)
    if error is not None:
        raise error
    for label, (other, _, theirs) in zip(group.identity.labels, all_reports, strict=True):
        if theirs is not None:
            raise ValueError(
                explain(
                    f"The replicas of {label} have different structures: {theirs}",
                    expected="the same structure on every replica.",
                    fix="return the same keys and lengths on every replica.",
                )
            )
        if other != paths:
            raise ValueError(
                explain(
                    f"{label} has the structure {other}, which differs at "
                    f"`{next(path for path in _differing(other, paths))}` from "
                    f"{group.identity.label}'s {paths}.",
                    expected="the same structure on every replica.",
                    fix="return the same keys and lengths on every replica.",
                )
            )
    return _joint_properties([all_reports[first] for first in firsts])


def _joint_properties(all_reports: Sequence[Any]) -> list[_LeafProperties]:
    properties: list[_LeafProperties] = []
    for parts in zip(*(kind_reports for _, kind_reports, _ in all_reports), strict=True):
        is_one = all(one and plain == parts[0][1] for one, plain, _, _ in parts)
        if any(shapes is None for _, _, shapes, _ in parts):
            properties.append(_LeafProperties(is_one))
        else:
            shapes = tuple(shape for _, _, shapes, _ in parts for shape in shapes)
            dtypes = tuple(dtype for _, _, _, dtypes in parts for dtype in dtypes)
            properties.append(_LeafProperties(is_one, shapes, dtypes))
    return properties


def _differing(one: list[str], other: list[str]) -> list[str]:
    return [a or b for a, b in itertools.zip_longest(one, other, fillvalue="") if a != b]


def _comparable(leaf: object) -> Any:
    """Returns a value that other processes can compare; other objects are assumed equal."""
    return leaf if isinstance(leaf, bool | int | float | str) else None


def _regroup_leaf(column: list[Any], leaf_properties: _LeafProperties, topology: Topology) -> Any:
    if leaf_properties.is_one:
        return column[0]
    if leaf_properties.can_join:
        return _stack(column, leaf_properties, topology)
    return PerReplica(objects=tuple(column))


def _all_equal(column: list[Any]) -> bool:
    first = column[0]
    if isinstance(first, np.ndarray):  # strings, dates or objects
        return all(np.array_equal(first, leaf) for leaf in column)
    return all(type(leaf) is type(first) and bool(leaf == first) for leaf in column)


def _stack(column: list[Any], leaf_properties: _LeafProperties, topology: Topology) -> PerReplica:
    """Stacks arrays that differ at most in their leading size."""
    arrays = [_to_canonical_dtype(leaf) for leaf in column]
    lengths = leaf_properties.lengths
    if lengths is None:
        return PerReplica(stacked=topology.stack(arrays))
    padded = [_pad_rows(leaf, max(lengths), arrays) for leaf in arrays]
    return PerReplica(stacked=topology.stack(padded), lengths=lengths)


def _to_canonical_dtype(leaf: object) -> Any:
    """Converts NumPy values to JAX's canonical dtype (float64 becomes float32)."""
    if isinstance(leaf, jax.Array):
        return leaf
    array = np.asarray(leaf)
    require_exact_integers([array])
    return np.asarray(array, jax.dtypes.canonicalize_dtype(array.dtype))


def _pad_rows(leaf: jax.Array | np.ndarray, num_rows: int, column: list[Any]) -> Any:
    """Pads by repeating a true row, so that arithmetic on the padding cannot overflow."""
    missing = num_rows - leaf.shape[0]
    if not missing:
        return leaf
    source = leaf if leaf.shape[0] else next((x for x in column if x.shape[0]), None)
    row = np.zeros((1, *leaf.shape[1:]), leaf.dtype) if source is None else np.asarray(source[-1:])
    return np.concatenate([np.asarray(leaf), np.repeat(row, missing, axis=0)], axis=0)

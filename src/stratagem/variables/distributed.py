"""Distributed values: `PerReplica` and `Mirrored`, frozen pytrees; `IndexedSlices`, some rows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.devices.lockstep import wait_until_ready
from stratagem.devices.mesh import Topology, outside_context_mesh
from stratagem.devices.shards import require_exact_integers
from stratagem.errors import explain, invalid
from stratagem.group.current import current_group
from stratagem.logs import PublicDir, as_html, new_table


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of an array that is zero elsewhere; rows with equal indices are summed.

    Args:
        values: the rows, of shape (k, ...) and any numeric dtype.
        indices: int array of shape (k,), positions on axis 0 of the dense array. Indices past the
            end are ignored.
        dense_shape: shape of the dense array, (n, ...), or None if not needed.

    Example:
        >>> rows = sg.IndexedSlices(jax.numpy.ones((2, 2)), jax.numpy.array([0, 0]), (2, 2))
        >>> rows.to_dense()
        Array([[2., 2.],
               [0., 0.]], dtype=float32)

    Source: TF 2.21 indexed_slices.py, IndexedSlices.
    """

    values: Any
    indices: Any
    dense_shape: tuple[int, ...] | None = None

    def tree_flatten(self) -> tuple[tuple[Any, Any], Any]:
        """Returns the arrays for JAX; `dense_shape` is static."""
        return (self.values, self.indices), self.dense_shape

    @classmethod
    def tree_unflatten(
        cls, dense_shape: tuple[int, ...] | None, children: Sequence[Any]
    ) -> IndexedSlices:
        """Rebuilds a value from the result of `tree_flatten`."""
        values, indices = children
        return cls(values, indices, dense_shape)

    def to_dense(self) -> jax.Array:
        """Returns the dense array.

        Returns:
            Array of shape `dense_shape`, in the dtype of the rows.

        Raises:
            ValueError: `dense_shape` is None, or `values` and `indices` do not match.
            TypeError: `indices` are not integers.
            OverflowError: 64-bit indices that JAX would change.
        """
        self.check()
        if self.dense_shape is None:
            raise invalid(
                "IndexedSlices without dense_shape cannot be converted to a dense array.",
                expected="the shape of the array that the rows belong to.",
                fix="pass dense_shape=variable.shape.",
            )
        values = jnp.asarray(self.values)
        whole = jnp.zeros(self.dense_shape, values.dtype)
        return whole.at[self._device_indices()].add(values, mode="drop")

    def combined(self) -> IndexedSlices:
        """Sums the rows with equal indices.

        Returns:
            Slices sorted by index, each index once. In a compiled program, whose shapes are static,
            as many rows as before: unused ones are zero, with an index past every end.

        Raises:
            ValueError: `values` and `indices` do not match.
            TypeError: `indices` are not integers.
            OverflowError: 64-bit indices that JAX would change.
        """
        self.check()
        indices = self._device_indices()
        if self.dense_shape is not None:  # -1 is the last row
            indices = jnp.where(indices < 0, indices + self.dense_shape[0], indices)
        nowhere = int(jnp.iinfo(indices.dtype).max)
        size = indices.shape[0] if isinstance(indices, Tracer) else None
        unique, inverse = jnp.unique(
            indices, return_inverse=True, size=size, fill_value=None if size is None else nowhere
        )
        sums = jax.ops.segment_sum(jnp.asarray(self.values), inverse, num_segments=unique.shape[0])
        return IndexedSlices(sums, unique, self.dense_shape)

    def _device_indices(self) -> jax.Array:
        require_exact_integers([self.indices], lambda _: "An array of indices")
        return jnp.asarray(self.indices)

    def check(self) -> None:
        """Raises if the parts do not match; see `to_dense`."""
        shape, indices_shape = jnp.shape(self.values), jnp.shape(self.indices)
        if len(indices_shape) != 1 or shape[:1] != indices_shape:
            raise invalid(
                f"IndexedSlices have values of shape {shape} and indices of shape {indices_shape}.",
                expected="one index per row: shapes (k, ...) and (k,).",
                fix="flatten the indices to (k,), and reshape the values to (k, ...).",
            )
        if self.dense_shape is not None and shape[1:] != tuple(self.dense_shape[1:]):
            raise invalid(
                f"IndexedSlices have rows of shape {shape[1:]} and dense_shape={self.dense_shape}.",
                expected=f"rows of shape {tuple(self.dense_shape[1:])}.",
                fix="pass the shape of the array that the rows belong to.",
            )
        dtype = getattr(self.indices, "dtype", None) or np.asarray(self.indices).dtype
        if not jnp.issubdtype(dtype, jnp.integer):
            raise TypeError(
                explain(
                    f"IndexedSlices have indices of dtype {dtype}.",
                    expected="integers.",
                    fix="use dataclasses.replace(slices, values=...) to change the values: "
                    "jax.tree.map applies to the indices, too.",
                )
            )

    def __jax_array__(self) -> jax.Array:
        return self.to_dense()


def is_indexed_slices(value: object) -> bool:
    """Returns True for `IndexedSlices`; for use as `is_leaf`."""
    return isinstance(value, IndexedSlices)


# In a notebook.
_MAX_SHOWN = 32
_MAX_CHARS = 200


class DistributedValues(PublicDir):
    """Base class of values with one component per replica.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
        >>> isinstance(values, sg.DistributedValues), strategy.local_results(values)
        (True, (Array(0, dtype=int32), Array(1, dtype=int32)))

    Source: TF 2.21 distribute.py (types), DistributedValues.
    """

    __slots__ = ()


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class PerReplica(DistributedValues):
    """One value per replica.

    Returned by `Strategy.run` and `distribute_values_from_function`. A value has one of three
    forms: `stacked` outside a step, `local` in `merge_call` of a compiled step, or `objects` for
    Python objects and for arrays whose shapes differ beyond the leading size.

    Args:
        stacked: array of shape (num_replicas, ...), sharded over the leading replica axis; with
            several processes, each holds the shards of its own replicas.
        lengths: true leading sizes, one per replica, if the components are padded; otherwise None.
        objects: the components of this process, in replica order.
        local: this replica's traced value in a compiled step.
        split_again: in an elastic group, returns the value for the members that are left.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group + 1)
        >>> values, int(strategy.reduce("sum", values, axis=None))
        (PerReplica[1 | 2], 3)

    Source: TF 2.21 values.py, PerReplica.
    """

    stacked: Any = None
    lengths: tuple[int, ...] | None = None
    objects: tuple[Any, ...] | None = None
    local: Any = None
    split_again: Callable[[], Any] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    def tree_flatten(self) -> tuple[tuple[Any, Any, Any], tuple[int, ...] | None]:
        """Returns the arrays for JAX; `lengths` are static."""
        return (self.stacked, self.objects, self.local), self.lengths

    @classmethod
    def tree_unflatten(cls, lengths: tuple[int, ...] | None, children: Sequence[Any]) -> PerReplica:
        """Rebuilds a value from the result of `tree_flatten`."""
        stacked, objects, local = children
        return cls(stacked=stacked, lengths=lengths, objects=objects, local=local)

    @property
    def components(self) -> tuple[Any, ...]:
        """Components of this process's replicas, without padding, in replica order."""
        if self.objects is not None:
            return self.objects
        if self.stacked is None:
            raise invalid(
                "This PerReplica belongs to a compiled step, which sees only one component.",
                expected="a value outside the step.",
                fix="use strategy.reduce or all_gather inside merge_call.",
                code="SG206",
            )
        return self.parts(0)

    @outside_context_mesh
    def parts(self, axis: int) -> tuple[Any, ...]:
        """Returns the components of this process without padding, in replica order.

        Args:
            axis: axis of a component that holds its rows; 1 if axis 0 holds steps.

        Returns:
            The components, in replica order.
        """
        first, parts = _split_replica_axis(self.stacked)
        if self.lengths is None:
            return parts
        lengths = self.lengths[first : first + len(parts)]
        rows = (slice(None),) * axis
        return tuple(part[(*rows, slice(n))] for part, n in zip(parts, lengths, strict=True))

    def __repr__(self) -> str:
        if self.local is not None:
            return f"PerReplica(local={self.local!r})"
        if self.objects is None and not isinstance(self.stacked, jax.Array | np.ndarray):
            return f"PerReplica(stacked={self.stacked!r})"  # JAX may put any object into a pytree
        return "PerReplica[" + " | ".join(str(part) for part in self.components) + "]"

    def _repr_html_(self) -> str | None:
        is_array = isinstance(self.stacked, jax.Array | np.ndarray)
        if self.objects is None and (not is_array or isinstance(self.stacked, Tracer)):
            return None  # in a step there are no values
        first = 0 if self.objects is not None else _split_replica_axis(self.stacked)[0]
        table = new_table(None, ["replica", "shape", "dtype", "value"])
        for replica, part in enumerate(self.components[:_MAX_SHOWN], start=first):
            shape, dtype = getattr(part, "shape", "-"), getattr(part, "dtype", type(part).__name__)
            table.add_row(str(replica), str(shape), str(dtype), _short(part))
        more = len(self.components) - _MAX_SHOWN
        return as_html(["PerReplica", table, *([f"... {more} more"] if more > 0 else [])])

    def _refuse(self, use: str) -> NoReturn:
        raise invalid(
            f"A PerReplica was used as {use}, but it holds one value per replica.",
            expected="a plain value.",
            fix="use strategy.local_results, strategy.reduce or strategy.gather first, or pass "
            "it to strategy.run, whose function sees one component.",
            code="SG206",
        )

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[Any, Any]:
        self._refuse("an array")

    def __jax_array__(self) -> jax.Array:
        self._refuse("an array")

    def __bool__(self) -> bool:
        self._refuse("a truth value")

    def __format__(self, format_spec: str) -> str:
        return self._refuse("a number") if format_spec else repr(self)

    def _refuse_as_number(self, *_: object) -> NoReturn:
        self._refuse("a number")

    def _refuse_as_array(self, *_: object) -> NoReturn:
        self._refuse("an array")

    __float__ = __int__ = __complex__ = __index__ = __round__ = _refuse_as_number
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_as_number
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _refuse_as_number
    __mod__ = __rmod__ = __pow__ = __rpow__ = __neg__ = __pos__ = __abs__ = _refuse_as_number
    __lt__ = __le__ = __gt__ = __ge__ = _refuse_as_number
    __matmul__ = __rmatmul__ = __getitem__ = __iter__ = __len__ = _refuse_as_array


def _short(value: object) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]} ..."


def _split_replica_axis(stacked: jax.Array | np.ndarray) -> tuple[int, tuple[Any, ...]]:
    """Returns the first replica of this process and the parts of all its replicas.

    Does not move data if the array is sharded over the replica axis.
    """
    if isinstance(stacked, jax.Array) and not isinstance(stacked, Tracer):
        if stacked.is_fully_replicated and not stacked.is_fully_addressable:
            # XLA replicates an array without elements to every device.
            own = _replicas_of_process(stacked)
            return own[0], tuple(stacked.addressable_data(0)[0] for _ in own)
        first: dict[int, Any] = {}  # one shard per replica: all its devices hold copies
        for shard in stacked.addressable_shards:
            first.setdefault(shard.index[0].start or 0, shard)
        starts = sorted(first)
        shards = [first[start] for start in starts]
        if not stacked.is_fully_addressable:
            wait_until_ready(stacked)
            return starts[0], tuple(shard.data[0] for shard in shards)
        if starts == list(range(stacked.shape[0])):
            return 0, tuple(shard.data[0] for shard in shards)
    return 0, tuple(stacked[index] for index in range(stacked.shape[0]))


def _replicas_of_process(stacked: jax.Array) -> list[int]:
    sharding: Any = stacked.sharding
    devices: list[jax.Device] = [*sharding.mesh.devices.flat]
    group_size = len(devices) // stacked.shape[0]
    process = jax.process_index()
    indices = [index for index, one in enumerate(devices) if one.process_index == process]
    return sorted({index // group_size for index in indices})


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class Mirrored(DistributedValues):
    """The same value on every replica.

    Returned by `extended.reduce_to`, accepted by `extended.update`. Works as an array anywhere.

    Args:
        value: the value of one copy.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> values = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group + 1)
        >>> total = strategy.extended.reduce_to("sum", values, destinations=None)
        >>> type(total).__name__, int(total + 10)
        ('Mirrored', 13)

    Source: TF 2.21 values.py, Mirrored.
    """

    value: Any

    def tree_flatten(self) -> tuple[tuple[Any], None]:
        """Returns the array for JAX."""
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, _: None, children: tuple[Any]) -> Mirrored:
        """Rebuilds a value from the result of `tree_flatten`."""
        return cls(children[0])

    def __jax_array__(self) -> jax.Array:
        return jax.numpy.asarray(self.value)

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        return np.array(self.value, dtype=dtype, copy=copy)

    def _repr_html_(self) -> str:
        array = jax.numpy.asarray(self.value)
        table = new_table(None, ["replica", "shape", "dtype", "value"])
        table.add_row("all", str(array.shape), str(array.dtype), _short(array))
        return as_html(["Mirrored", table])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "value":  # during construction or copying
            raise AttributeError(name)
        return getattr(jax.numpy.asarray(self.value), name)

    def __format__(self, format_spec: str) -> str:
        return format(self.value, format_spec)


def _add_operator(name: str) -> None:
    """Adds an array operator to `Mirrored`, because Python looks operators up on the class."""

    def operator(self: Mirrored, *others: object) -> Any:
        plain = [*map(without_mirrored, others)]
        return getattr(jax.numpy.asarray(self.value), name)(*plain)

    setattr(Mirrored, name, operator)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
_OTHERS = ("neg", "pos", "abs", "lt", "le", "gt", "ge", "eq", "ne", "getitem", "len", "iter")
_CONVERSIONS = ("bool", "float", "int", "index")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS, *_CONVERSIONS):
    _add_operator(f"__{_name}__")


# `regroup` and `select_replica`: conversion between one structure per replica and `PerReplica`.


def is_per_replica(value: object) -> bool:
    """Returns True for a `PerReplica`; for use as `is_leaf`."""
    return isinstance(value, PerReplica)


def is_distributed(value: object) -> bool:
    """Returns True for a distributed value; for use as `is_leaf`."""
    return isinstance(value, DistributedValues)


def without_mirrored(value: object) -> Any:
    """Returns the value of a `Mirrored`, and any other itself."""
    return value.value if isinstance(value, Mirrored) else value


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

    return jax.tree.map(select, value, is_leaf=is_distributed)


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
        raise invalid(
            "regroup received no values.",
            expected="one structure per replica.",
            fix="pass a list with one structure per replica.",
        )
    spans = topology is not None and topology.spans_processes
    if len(values) == 1 and (topology is None or topology.num_replicas == 1):
        return values[0]
    return _regroup_leaves(values, topology or Topology(None), spans=spans)


def _regroup_leaves(values: Sequence[Any], topology: Topology, *, spans: bool) -> Any:
    """Regroups each leaf; `spans` is True if other processes have replicas, too."""
    flat = [jax.tree_util.tree_flatten_with_path(value, is_leaf=is_distributed) for value in values]
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
            return invalid(
                f"Replica {index} has the structure {structure}, which differs "
                f"{_first_difference(flat[0][0], leaves)} from replica 0's {flat[0][1]}.",
                expected="the same structure on every replica.",
                fix="return the same keys and lengths on every replica.",
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
            raise invalid(
                f"The replicas of {label} have different structures: {theirs}",
                expected="the same structure on every replica.",
                fix="return the same keys and lengths on every replica.",
            )
        if other != paths:
            raise invalid(
                f"{label} has the structure {other}, which differs at "
                f"`{next(path for path in _differing(other, paths))}` from "
                f"{group.identity.label}'s {paths}.",
                expected="the same structure on every replica.",
                fix="return the same keys and lengths on every replica.",
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

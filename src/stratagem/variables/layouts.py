"""Stores of values between steps, and layouts: the path rules that shard variables."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from stratagem.devices.compression import Compression
from stratagem.devices.mesh import REPLICA_AXIS, SHARD_AXIS, Topology
from stratagem.devices.shards import put_shards, replicas_span_processes
from stratagem.errors import check_type, explain, invalid
from stratagem.logs import size_text, warn_on_one_worker
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    import keras


# Store: the place of a variable's value between steps, such as shards or host memory.


class Store(Protocol):
    """Stores values of variables between steps, other than as a copy on each replica's device.

    A step loads its inputs, computes, and stores new values. `stored` below is an array that `put`
    or `unload` returned; shapes are global, without a replica axis.
    """

    @property
    def serves_rows(self) -> bool:
        """True if replicas receive only the table rows that they look up."""
        ...

    @property
    def is_on_replicas(self) -> bool:
        """True if the replicas' devices store the value, or reach it without another device."""
        ...

    @property
    def is_pinned(self) -> bool:
        """True if the value is in pinned host memory, which devices copy from within a step."""
        ...

    def sharding(self, shape: tuple[int, ...]) -> jax.sharding.Sharding:
        """Returns the sharding of a stored value of this shape."""
        ...

    def step_sharding(self, shape: tuple[int, ...], topology: Topology) -> jax.sharding.Sharding:
        """Returns the sharding of the result of `for_step`."""
        ...

    def put(self, value: object) -> jax.Array:
        """Stores an array, on any devices, or anything that JAX can convert to one."""
        ...

    def gather(self, stored: jax.Array) -> jax.Array:
        """Returns the whole value on one device."""
        ...

    def replicate(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Returns a copy on each replica's device."""
        ...

    def load(self, stored: jax.Array) -> jax.Array:
        """Moves a stored value to the memory its devices compute in. Works inside programs."""
        ...

    def unload(self, value: jax.Array) -> jax.Array:
        """Moves a new value, computed on these devices, to its memory. Inverts `load`."""
        ...

    def for_step(self, stored: jax.Array, topology: Topology) -> jax.Array:
        """Returns the array that a compiled step takes as its input."""
        ...

    def for_update(self, value: jax.Array) -> jax.Array:
        """Moves a replicated value, such as a summed gradient, to the devices of the update."""
        ...

    def update_sharding(self) -> jax.sharding.Sharding:
        """Returns the sharding of the result of `for_update`."""
        ...

    def rows(self, loaded: jax.Array, ids: jax.Array | np.ndarray, topology: Topology) -> jax.Array:
        """Looks up rows of `loaded`, a table of shape (n, ...), for each replica.

        `ids` are integers, with the replica axis first if there are several replicas. Returns shape
        (*ids.shape, ...); ids out of range get the fill value of `jax.numpy.take`.
        """
        ...


def store_of(variable: object) -> Store | None:
    """Returns the store of a Keras variable; None if each replica's device has a copy."""
    return getattr(variable, "store", None)


def is_remote(variable: keras.Variable) -> bool:
    """Returns True if a variable is stored outside this process, such as on parameter servers."""
    return getattr(variable, "is_remote", False)


def is_keyed(variable: object) -> bool:
    """Returns True for a table on parameter servers whose rows are found by 64-bit keys."""
    return getattr(variable, "is_keyed", False)


# Choice of the variables whose gradients are sent compressed.


def is_compressed(variable: Any, compression: Compression | None) -> bool:
    """Returns True if gradients of a variable are sent compressed: the only place that decides.

    Args:
        variable: a trained variable.
        compression: of the strategy; None compresses nothing.
    """
    is_summed_whole = store_of(variable) is None and not getattr(variable, "is_large_table", False)
    if compression is None or not is_summed_whole:
        return False
    is_float = jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)
    return is_float and compression.compresses(tuple(variable.shape))


# Layouts of variables: path rules that shard them over replicas and a replica's devices.


# Axes of a Keras device mesh as axes of a strategy: replicas, and devices of a replica.

# Name of the axis of a replica's devices in layouts.
_LOGICAL = "logical"

# Usual names of the axis that splits batches. Otherwise it is the first, as in Keras.
_BATCH_NAMES = ("batch", "data")


def axis_names(layout_map: object, topology: Topology) -> dict[str, tuple[str, ...]]:
    """Returns the axes of the topology's mesh for each name that a layout may use.

    The names are "replica" and "logical", or those of a `LayoutMap`'s mesh: its batch axis stands
    for the replicas, the others for the devices of a replica if the sizes match.
    """
    mesh: Any = getattr(layout_map, "device_mesh", None)
    if mesh is None or _LOGICAL in mesh.axis_names:
        return {_LOGICAL: topology.logical_axes, REPLICA_AXIS: (topology.shard_axis,)}
    count = topology.num_logical_devices
    if len(mesh.shape) == 1 and mesh.shape[0] == count > 1:
        return {mesh.axis_names[0]: topology.logical_axes}
    batch = _batch_axis(mesh)
    of_batch: dict[str, tuple[str, ...]] = {mesh.axis_names[batch]: (topology.shard_axis,)}
    found = dict(of_batch)
    free = list(topology.logical_axes)
    for place, (name, size) in enumerate(zip(mesh.axis_names, mesh.shape, strict=True)):
        if place != batch:
            found[name] = _taken(free, topology, size)
            if math.prod(topology.mesh.shape[axis] for axis in found[name]) != size:
                return of_batch
    return of_batch if free else found


def groups_of_mesh(layout_map: object) -> list[list[Any]] | None:
    """Returns the devices of each replica in a `LayoutMap`'s mesh; None if it has no mesh."""
    mesh: Any = getattr(layout_map, "device_mesh", None)
    if mesh is None:
        return None
    devices = np.moveaxis(mesh.devices, _batch_axis(mesh), 0)
    return devices.reshape(len(devices), -1).tolist()


def devices_per_replica_of(layout_map: object) -> int:
    """Returns the number of devices of a replica in a `LayoutMap`'s mesh; 1 if it has no mesh."""
    groups = groups_of_mesh(layout_map)
    return 1 if groups is None else len(groups[0])


def _batch_axis(mesh: Any) -> int:
    names = list(mesh.axis_names)
    return next((names.index(name) for name in _BATCH_NAMES if name in names), 0)


def _taken(free: list[str], topology: Topology, size: int) -> tuple[str, ...]:
    """Removes and returns the first free axes, until their product is at least `size`."""
    taken: list[str] = []
    while free and math.prod(topology.mesh.shape[axis] for axis in taken) < size:
        taken.append(free.pop(0))
    return tuple(taken)


_REPLICAS = {REPLICA_AXIS, SHARD_AXIS}


@dataclasses.dataclass(frozen=True)
class Division:
    """Mesh axes over which each axis of a variable is sharded; () for none.

    Keras passes the division of a variable to its optimizer slots.
    """

    axes: tuple[tuple[str, ...], ...]

    @property
    def replica_axis(self) -> int | None:
        """The axis that is sharded over replicas, or None."""
        return next((i for i, names in enumerate(self.axes) if _REPLICAS & {*names}), None)

    @property
    def logical_spec(self) -> PartitionSpec:
        """The spec of a replica's copy, sharded over its devices."""
        return self.spec(None)

    def spec(self, replica_axis: int | None, name: str = REPLICA_AXIS) -> PartitionSpec:
        """Returns the spec with another axis, or none, sharded over the replicas' mesh axis."""
        entries: list[Any] = [
            name if axis == replica_axis else _logical(names) or None
            for axis, names in enumerate(self.axes)
        ]
        while entries and entries[-1] is None:
            entries.pop()
        return PartitionSpec(*entries)

    def is_free(self, axis: int) -> bool:
        """Returns True if an axis is not sharded over a replica's devices."""
        return not _logical(self.axes[axis])

    def sharding(self, topology: Topology) -> NamedSharding:
        """Returns the sharding of a variable of which each replica has a copy."""
        return NamedSharding(topology.mesh, self.logical_spec)

    def fits(self, shape: Sequence[int], topology: Topology) -> bool:
        """Returns True if a variable of this shape can be sharded this way."""
        return len(shape) == len(self.axes) and not any(
            size % _num_parts(names, topology) for size, names in zip(shape, self.axes, strict=True)
        )


class VariableLayouts:
    """Rules that shard variables over replicas and over the devices of a replica.

    `layout_map` is a `keras.distribution.LayoutMap`, or a mapping from path patterns to tuples with
    an entry per axis: `"logical"` or `"replica"` to shard it, else None. A LayoutMap with a device
    mesh uses the mesh's axis names. Raises TypeError for other types, and ValueError for a layout
    with another axis, or with one more than once.
    """

    def __init__(self, layout_map: Any, topology: Topology) -> None:
        wanted = "a keras.distribution.LayoutMap, or a dict of the same form"
        fix = 'pass for example layout_map={".*kernel": (None, "logical")}.'
        check_type("layout_map", layout_map, Mapping, wanted, fix)
        self._topology = topology
        names = axis_names(layout_map, topology)
        self._axes = {
            pattern: _checked_axes(pattern, layout, names) for pattern, layout in layout_map.items()
        }
        self._names = {
            pattern: getattr(layout, "axes", layout) for pattern, layout in layout_map.items()
        }
        self._matched: set[str] = set()
        self._warned: set[str] = set()

    @property
    def uses_replicas(self) -> bool:
        """True if a layout shards a variable over replicas."""
        return any(_REPLICAS & {*names} for axes in self._axes.values() for names in axes)

    def division(
        self,
        path: str,
        shape: Sequence[int],
        inherited: Division | None = None,
        *,
        is_trainable: bool = True,
        itemsize: int = 4,
    ) -> Division | None:
        """Returns the division of a variable; None leaves it whole.

        For a slot, `inherited` is the trained variable's division, which overrides the rules if it
        fits the shape. An axis whose size is not a multiple of the number of devices is sharded
        over a factor of them if possible, with a warning for the first variable of a rule.
        `itemsize` is that of the variable, for the warning. Raises ValueError if several rules
        match, or if a rule has more axes than a trainable variable; others then stay whole.
        """
        if inherited is not None and inherited.fits(shape, self._topology):
            return inherited
        patterns = [path] if path in self._axes else self._matching(path)
        if len(patterns) > 1:
            raise invalid(
                f"Variable {path!r} matches several patterns of layout_map: {patterns}.",
                expected="at most one matching pattern.",
                fix="make the patterns more specific.",
            )
        if not patterns:
            return None
        self._matched.update(patterns)
        axes = self._axes[patterns[0]]
        if len(axes) > len(shape):
            if not is_trainable:
                return None
            raise invalid(
                f"Variable {path!r} of shape {tuple(shape)} matches {patterns[0]!r} of "
                f"layout_map, which has {len(axes)} axes.",
                expected="no more axes than the variable has.",
                fix="correct the layout, or exclude the variable from the pattern.",
            )
        wanted = (*axes, *[()] * (len(shape) - len(axes)))
        axes = tuple(
            _fitting(names, size, self._topology) for names, size in zip(wanted, shape, strict=True)
        )
        if uneven := self._uneven(shape, wanted, axes):
            self._warn(patterns[0], path, shape, uneven, itemsize)
        return Division(axes) if any(axes) else None

    def covers(self, path: str) -> bool:
        """Returns True if a rule matches a path."""
        return path in self._axes or bool(self._matching(path))

    def _uneven(
        self,
        shape: Sequence[int],
        wanted: Sequence[tuple[str, ...]],
        axes: Sequence[tuple[str, ...]],
    ) -> dict[int, tuple[int, int]]:
        """Returns the axes with fewer parts than a rule says, and both numbers of parts."""
        counts = [
            (_num_parts(rule, self._topology), _num_parts(own, self._topology))
            for rule, own in zip(wanted, axes, strict=True)
        ]
        return {axis: pair for axis, pair in enumerate(counts) if pair[0] != pair[1]}

    def _warn(
        self,
        pattern: str,
        path: str,
        shape: Sequence[int],
        uneven: Mapping[int, tuple[int, int]],
        itemsize: int,
    ) -> None:
        if pattern in self._warned:
            return
        self._warned.add(pattern)
        names = self._names[pattern]
        sizes = " and ".join(
            f"{shape[axis]} over {wanted} devices (axis {axis}, {names[axis]!r}), which leaves "
            f"{'it whole' if parts == 1 else f'{parts} parts'}"
            for axis, (wanted, parts) in uneven.items()
        )
        whole = math.prod(shape) * itemsize
        factor = math.prod(wanted / parts for wanted, parts in uneven.values())
        others = math.prod(
            _num_parts(rule, self._topology)
            for axis, rule in enumerate(self._axes[pattern])
            if axis not in uneven
        )
        held = whole / others / math.prod(parts for _, parts in uneven.values())
        warn_on_one_worker(
            explain(
                f"Variable {path!r} of shape {tuple(shape)} cannot be divided as {pattern!r} of "
                f"layout_map says: {sizes}. A device holds {size_text(held)} of it instead of "
                f"{size_text(held / factor)}.",
                expected="a size that is a multiple of the number of devices.",
                fix="shard another axis, or ignore this: results are the same. Other variables of "
                "the pattern are not reported.",
            ),
            stacklevel=3,
        )

    def on(self, topology: Topology) -> VariableLayouts:
        """Returns the same rules for replicas with the same number of devices on `topology`."""
        layouts = copy.copy(self)
        layouts._topology, layouts._matched = topology, set(self._matched)
        return layouts

    def require_matches(self) -> None:
        """Raises ValueError if a rule has matched no variable. Call when training starts."""
        unmatched = [pattern for pattern in self._axes if pattern not in self._matched]
        if unmatched:
            raise invalid(
                f"The patterns {unmatched} of layout_map match no variable.",
                expected="patterns that match the whole path of a variable, such as "
                f"{'.*/kernel'!r}.",
                fix="correct the patterns (see for example model.weights[0].path), or remove "
                "them. To shard outputs of layers, use strategy.split_to_logical_devices.",
            )

    def _matching(self, path: str) -> list[str]:
        return [pattern for pattern in self._axes if re.fullmatch(pattern, path)]


def _logical(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in _REPLICAS)


def _fitting(names: tuple[str, ...], size: int, topology: Topology) -> tuple[str, ...]:
    """Returns the mesh axes that divide a size evenly into the most parts; first ones first.

    Grouped heads then lie where the heads that read them do.
    """
    choices = [
        own for count in range(len(names) + 1) for own in itertools.combinations(names, count)
    ]
    fitting = [own for own in choices if size % _num_parts(own, topology) == 0]
    found = max(fitting, key=lambda own: _num_parts(own, topology))
    return found if _num_parts(found, topology) > 1 else ()


def _num_parts(names: Iterable[str], topology: Topology) -> int:
    return math.prod(topology.mesh.shape[name] for name in names)


def _checked_axes(
    pattern: str, layout: object, names: Mapping[str, tuple[str, ...]]
) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes of each axis of a layout."""
    axes: Any = getattr(layout, "axes", layout)
    wanted = "a keras.distribution.TensorLayout, or a tuple"
    check_type(f"layout_map[{pattern!r}]", axes, tuple | list, wanted)
    used = [name for name in axes if name is not None]
    if len(used) > len(set(used)) or not set(used) <= set(names):
        raise invalid(
            f"layout_map[{pattern!r}] shards over {used}.",
            expected=f"each of {sorted(names)} at most once, and None for other axes.",
            fix='use "logical", or a LayoutMap whose device mesh has axes with as many '
            "devices as there are replicas, and as a replica has.",
        )
    return tuple(() if name is None else names[name] for name in axes)


def require_layouts_used(layouts: VariableLayouts | None, written: Iterable[Any]) -> None:
    """Raises ValueError if a step trains the strategy's variables and a layout rule matches none.

    `written` are the variables that the step assigns.
    """
    if layouts is None:
        return
    if any(getattr(one, "trainable", False) and home_of(one) is not None for one in written):
        layouts.require_matches()


def stored_sharding(variable: object, topology: Topology) -> NamedSharding:
    """Returns the sharding of a variable's storage; replicated without a strategy."""
    home = home_of(variable)
    if home is None:
        return topology.replicated
    if home.kind is VariableKind.ON_READ:
        return topology.stacked
    division: Division | None = getattr(variable, "division", None)
    return topology.replicated if division is None else division.sharding(topology)


def is_in_parts(variable: object, topology: Topology) -> bool:
    """Returns True if a read of the whole variable may take all processes.

    It has a store, or is divided over the devices of replicas that span processes.
    """
    is_divided = getattr(variable, "division", None) is not None
    return store_of(variable) is not None or (is_divided and replicas_span_processes(topology))


def put_stored(variable: object, value: object, topology: Topology) -> Any:
    """Puts a value, the same on all processes, on devices as a mirrored variable stores it."""
    division: Division | None = getattr(variable, "division", None)
    if division is None:
        return topology.replicate(value)
    return put_shards(value, division.sharding(topology))

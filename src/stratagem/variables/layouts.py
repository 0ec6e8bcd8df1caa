"""Layouts of variables: path rules that shard them over a replica's logical devices."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from stratagem.messages import explain
from stratagem.topology import Topology
from stratagem.topology.shards import put_shards
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of

__all__ = [
    "Division",
    "VariableLayouts",
    "put_stored",
    "require_layouts_used",
    "stored_sharding",
]

# Name of the axis of a replica's devices in layouts.
_LOGICAL = "logical"


class Division:
    """Axis along which a replica's copy of a variable is sharded over its logical devices.

    Keras passes it from a variable to its optimizer slots.

    Args:
        axis: sharded axis; its size is a multiple of the number of devices.
        rank: rank of the variable.
    """

    def __init__(self, axis: int, rank: int) -> None:
        self.axis = axis
        self.rank = rank

    def sharding(self, topology: Topology) -> NamedSharding:
        """Returns the sharding of the variable."""
        spec = PartitionSpec(*[None] * self.axis, topology.logical_axes)
        return NamedSharding(topology.mesh, spec)

    def fits(self, shape: Sequence[int], topology: Topology) -> bool:
        """True if a variable of this shape can be sharded this way."""
        return len(shape) == self.rank and shape[self.axis] % topology.num_logical_devices == 0


class VariableLayouts:
    """Rules that shard variables over logical devices.

    Args:
        layout_map: a `keras.distribution.LayoutMap`, or a mapping from path patterns to tuples
            with an entry for each axis: `"logical"` to shard it, else None. A LayoutMap with a
            device mesh uses the mesh's axis name.
        topology: the devices of the replicas.

    Raises:
        TypeError: `layout_map` is not a mapping, or a layout is not a tuple.
        ValueError: A layout shards by another axis, or more than once.
    """

    def __init__(self, layout_map: Any, topology: Topology) -> None:
        if not isinstance(layout_map, Mapping):
            raise TypeError(
                explain(
                    f"layout_map={layout_map!r} is of type {type(layout_map).__name__}.",
                    expected="a keras.distribution.LayoutMap, or a dict of its form.",
                    fix='write for example layout_map={".*kernel": (None, "logical")}.',
                )
            )
        self._topology = topology
        names = _axis_names(layout_map, topology)
        self._axes = {
            pattern: _divided_axis(pattern, layout, names) for pattern, layout in layout_map.items()
        }
        self._matched: set[str] = set()

    def division(
        self,
        path: str,
        shape: Sequence[int],
        inherited: Division | None = None,
        *,
        is_trainable: bool = True,
    ) -> Division | None:
        """Returns the division of a variable; None to leave it whole.

        For a slot, `inherited` is the trained variable's division, which wins over the rules if it
        fits the shape. If a rule does not fit, a variable that is not trainable stays whole.

        Raises:
            ValueError: Several rules match, or a rule does not fit a trainable variable.
        """
        if inherited is not None and inherited.fits(shape, self._topology):
            return inherited
        patterns = [path] if path in self._axes else self._matching(path)
        if len(patterns) > 1:
            raise ValueError(
                explain(
                    f"Variable {path!r} matches the patterns {patterns} of layout_map.",
                    expected="at most one.",
                    fix="make the patterns more precise.",
                )
            )
        if not patterns:
            return None
        self._matched.update(patterns)
        num_axes, axis = self._axes[patterns[0]]
        count = self._topology.num_logical_devices
        if num_axes > len(shape) or (axis is not None and shape[axis] % count):
            if not is_trainable:
                return None
            raise ValueError(
                explain(
                    f"Variable {path!r} of shape {tuple(shape)} matches {patterns[0]!r} of "
                    f"layout_map, which has {num_axes} axes and divides number {axis} by {count}.",
                    expected="at most as many axes as the variable has, and a size that the "
                    "number of logical devices divides.",
                    fix="divide another axis, or leave the variable out.",
                )
            )
        return None if axis is None or count == 1 else Division(axis, len(shape))

    def on(self, topology: Topology) -> VariableLayouts:
        """Returns the same rules for other replicas with as many devices each."""
        layouts = copy.copy(self)
        layouts._topology, layouts._matched = topology, set(self._matched)
        return layouts

    def require_matches(self) -> None:
        """Checks that each rule has matched a variable. Call when training starts.

        Raises:
            ValueError: A rule has matched no variable.
        """
        unmatched = [pattern for pattern in self._axes if pattern not in self._matched]
        if unmatched:
            raise ValueError(
                explain(
                    f"The patterns {unmatched} of layout_map match no variable.",
                    expected="patterns that match the whole path of a variable, such as "
                    f"{'.*/kernel'!r}.",
                    fix="correct the pattern (model.weights[0].path is the path of a variable), or "
                    "leave it out; what layers return is divided by "
                    "strategy.split_to_logical_devices.",
                )
            )

    def _matching(self, path: str) -> list[str]:
        return [pattern for pattern in self._axes if re.fullmatch(pattern, path)]


def _axis_names(layout_map: Any, topology: Topology) -> set[str]:
    """Names of a replica's devices in layouts: mesh axes of their number, or "logical"."""
    mesh = getattr(layout_map, "device_mesh", None)
    if mesh is None or _LOGICAL in mesh.axis_names:
        return {_LOGICAL}
    count = topology.num_logical_devices
    sizes = zip(mesh.axis_names, mesh.shape, strict=True)
    return {name for name, size in sizes if size == count}


def _divided_axis(pattern: str, layout: Any, names: set[str]) -> tuple[int, int | None]:
    """Number of axes of a layout, and its sharded axis, if any."""
    axes = getattr(layout, "axes", layout)
    if not isinstance(axes, tuple | list):
        raise TypeError(
            explain(
                f"layout_map[{pattern!r}] is {layout!r}, of type {type(layout).__name__}.",
                expected="a keras.distribution.TensorLayout, or a tuple.",
                fix='write for example (None, "logical").',
            )
        )
    divided = [place for place, name in enumerate(axes) if name is not None]
    if len(divided) > 1 or any(axes[place] not in names for place in divided):
        raise ValueError(
            explain(
                f"layout_map[{pattern!r}] divides by {[axes[place] for place in divided]}.",
                expected=f"one axis divided by one of {sorted(names)}, the devices of a replica, "
                "and None for the others.",
                fix='write "logical", or give the LayoutMap a device mesh whose axis is as long '
                "as a group of devices.",
            )
        )
    return len(axes), divided[0] if divided else None


def require_layouts_used(layouts: VariableLayouts | None, written: Iterable[Any]) -> None:
    """Checks that each layout rule matches a variable, if a step trains a strategy's variables.

    `written` are the variables that the step assigns.

    Raises:
        ValueError: A rule matches no variable.
    """
    if layouts is None:
        return
    if any(getattr(one, "trainable", False) and home_of(one) is not None for one in written):
        layouts.require_matches()


def stored_sharding(variable: Any, topology: Topology) -> NamedSharding:
    """Returns the sharding of a variable's storage; replicated outside every strategy."""
    home = home_of(variable)
    if home is None:
        return topology.replicated
    if home.kind is VariableKind.ON_READ:
        return topology.stacked
    division: Division | None = getattr(variable, "division", None)
    return topology.replicated if division is None else division.sharding(topology)


def put_stored(variable: Any, value: Any, topology: Topology) -> Any:
    """Puts a value, the same on all processes, on devices as a mirrored variable stores it."""
    division: Division | None = getattr(variable, "division", None)
    if division is None:
        return topology.replicate(value)
    return put_shards(value, division.sharding(topology))

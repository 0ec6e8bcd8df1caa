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

    The size of `axis` is a multiple of the number of devices; `rank` is the variable's. Keras
    passes the division of a variable to its optimizer slots.
    """

    def __init__(self, axis: int, rank: int) -> None:
        self.axis = axis
        self.rank = rank

    def sharding(self, topology: Topology) -> NamedSharding:
        """Returns the sharding of the variable."""
        spec = PartitionSpec(*[None] * self.axis, topology.logical_axes)
        return NamedSharding(topology.mesh, spec)

    def fits(self, shape: Sequence[int], topology: Topology) -> bool:
        """Returns True if a variable of this shape can be sharded this way."""
        return len(shape) == self.rank and shape[self.axis] % topology.num_logical_devices == 0


class VariableLayouts:
    """Rules that shard variables over logical devices.

    `layout_map` is a `keras.distribution.LayoutMap`, or a mapping from path patterns to tuples with
    an entry per axis: `"logical"` to shard it, else None. A LayoutMap with a device mesh uses the
    mesh's axis name. Raises TypeError for other types, and ValueError for a layout that shards by
    another axis or more than once.
    """

    def __init__(self, layout_map: object, topology: Topology) -> None:
        if not isinstance(layout_map, Mapping):
            raise TypeError(
                explain(
                    f"layout_map={layout_map!r} is of type {type(layout_map).__name__}.",
                    expected="a keras.distribution.LayoutMap, or a dict of the same form.",
                    fix='pass for example layout_map={".*kernel": (None, "logical")}.',
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
        """Returns the division of a variable; None leaves it whole.

        For a slot, `inherited` is the trained variable's division, which overrides the rules if it
        fits the shape. Raises ValueError if several rules match, or if a rule does not fit a
        trainable variable; other variables then stay whole.
        """
        if inherited is not None and inherited.fits(shape, self._topology):
            return inherited
        patterns = [path] if path in self._axes else self._matching(path)
        if len(patterns) > 1:
            raise ValueError(
                explain(
                    f"Variable {path!r} matches several patterns of layout_map: {patterns}.",
                    expected="at most one matching pattern.",
                    fix="make the patterns more specific.",
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
                    f"layout_map, which has {num_axes} axes and shards axis {axis} over {count} "
                    "devices.",
                    expected="no more axes than the variable has, and a size that is a multiple of "
                    "the number of logical devices.",
                    fix="shard another axis, or exclude the variable from the pattern.",
                )
            )
        return None if axis is None or count == 1 else Division(axis, len(shape))

    def on(self, topology: Topology) -> VariableLayouts:
        """Returns the same rules for replicas with the same number of devices on `topology`."""
        layouts = copy.copy(self)
        layouts._topology, layouts._matched = topology, set(self._matched)
        return layouts

    def require_matches(self) -> None:
        """Raises ValueError if a rule has matched no variable. Call when training starts."""
        unmatched = [pattern for pattern in self._axes if pattern not in self._matched]
        if unmatched:
            raise ValueError(
                explain(
                    f"The patterns {unmatched} of layout_map match no variable.",
                    expected="patterns that match the whole path of a variable, such as "
                    f"{'.*/kernel'!r}.",
                    fix="correct the patterns (see for example model.weights[0].path), or remove "
                    "them. To shard outputs of layers, use strategy.split_to_logical_devices.",
                )
            )

    def _matching(self, path: str) -> list[str]:
        return [pattern for pattern in self._axes if re.fullmatch(pattern, path)]


def _axis_names(layout_map: object, topology: Topology) -> set[str]:
    """Returns the axis names that stand for a replica's devices: by mesh size, or "logical"."""
    mesh = getattr(layout_map, "device_mesh", None)
    if mesh is None or _LOGICAL in mesh.axis_names:
        return {_LOGICAL}
    count = topology.num_logical_devices
    sizes = zip(mesh.axis_names, mesh.shape, strict=True)
    return {name for name, size in sizes if size == count}


def _divided_axis(pattern: str, layout: object, names: set[str]) -> tuple[int, int | None]:
    """Returns the number of axes of a layout, and its sharded axis or None."""
    axes = getattr(layout, "axes", layout)
    if not isinstance(axes, tuple | list):
        raise TypeError(
            explain(
                f"layout_map[{pattern!r}]={layout!r} is of type {type(layout).__name__}.",
                expected="a keras.distribution.TensorLayout, or a tuple.",
                fix='pass for example (None, "logical").',
            )
        )
    divided = [place for place, name in enumerate(axes) if name is not None]
    if len(divided) > 1 or any(axes[place] not in names for place in divided):
        raise ValueError(
            explain(
                f"layout_map[{pattern!r}] shards over {[axes[place] for place in divided]}.",
                expected=f"one axis sharded over one of {sorted(names)}, the devices of a replica, "
                "and None for the others.",
                fix='use "logical", or a LayoutMap whose device mesh has an axis with as many '
                "devices as a replica.",
            )
        )
    return len(axes), divided[0] if divided else None


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


def put_stored(variable: object, value: object, topology: Topology) -> Any:
    """Puts a value, the same on all processes, on devices as a mirrored variable stores it."""
    division: Division | None = getattr(variable, "division", None)
    if division is None:
        return topology.replicate(value)
    return put_shards(value, division.sharding(topology))

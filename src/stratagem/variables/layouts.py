"""Which variables are divided over the devices of a replica, told by rules for their paths."""

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

# What a layout calls the devices of a replica.
_LOGICAL = "logical"


class Division:
    """Along which axis the copies of a variable are divided over the devices of their replica.

    Keras hands it from a variable to what an optimizer keeps for it.

    Args:
        axis: of the variable, whose size the number of the devices divides.
        rank: of the variable.
    """

    def __init__(self, axis: int, rank: int) -> None:
        self.axis = axis
        self.rank = rank

    def sharding(self, topology: Topology) -> NamedSharding:
        """Returns how the variable lies on devices.

        Args:
            topology: the devices of the replicas.
        """
        spec = PartitionSpec(*[None] * self.axis, topology.logical_axes)
        return NamedSharding(topology.mesh, spec)

    def fits(self, shape: Sequence[int], topology: Topology) -> bool:
        """Tells whether a variable of some shape can be divided so.

        Args:
            shape: of the variable.
            topology: the devices of the replicas.
        """
        return len(shape) == self.rank and shape[self.axis] % topology.num_logical_devices == 0


class VariableLayouts:
    """Rules for dividing variables.

    Args:
        layout_map: a `keras.distribution.LayoutMap`, or a mapping of its form: from patterns of
            paths to tuples with an entry for each axis, `"logical"` where it is divided and None
            elsewhere. A LayoutMap with a device mesh names the axis as its mesh does.
        topology: the devices of the replicas.

    Raises:
        TypeError: no mapping, or a layout that is no tuple.
        ValueError: a layout that divides by another axis, or twice.
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
        """Returns how a variable is divided.

        Args:
            path: of the variable.
            shape: of the variable.
            inherited: of the variable that an optimizer keeps it for; it goes before the rules
                where it fits the shape.
            is_trainable: False for what stays whole where a rule does not fit its shape, such as
                what an optimizer keeps for rows and columns.

        Returns:
            The division; None where no rule matches, or where it divides nothing.

        Raises:
            ValueError: several rules match, or a trainable variable cannot be divided so.
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
        """Returns the same rules for other devices, to which the variables may go along.

        Args:
            topology: replicas of as many devices.
        """
        layouts = copy.copy(self)
        layouts._topology, layouts._matched = topology, set(self._matched)
        return layouts

    def require_matches(self) -> None:
        """Raises where a rule has matched no variable so far. Call when training starts.

        Raises:
            ValueError: there is such a rule.
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
    """What layouts may call the devices of a replica: the axes of a device mesh of their number."""
    mesh = getattr(layout_map, "device_mesh", None)
    if mesh is None or _LOGICAL in mesh.axis_names:
        return {_LOGICAL}
    count = topology.num_logical_devices
    sizes = zip(mesh.axis_names, mesh.shape, strict=True)
    return {name for name, size in sizes if size == count}


def _divided_axis(pattern: str, layout: Any, names: set[str]) -> tuple[int, int | None]:
    """How many axes a layout has, and which of them is divided."""
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
    """Raises where a rule for layouts is of no use to the model that is trained.

    Args:
        layouts: of the strategy.
        written: variables that a step assigns; one that assigns a strategy's trainable ones is
            training.

    Raises:
        ValueError: there is such a rule.
    """
    if layouts is None:
        return
    if any(getattr(one, "trainable", False) and home_of(one) is not None for one in written):
        layouts.require_matches()


def stored_sharding(variable: Any, topology: Topology) -> NamedSharding:
    """Returns how the storage of a variable lies on devices.

    Args:
        variable: of a strategy, or any other, of which each replica has a copy.
        topology: the devices; those of its strategy, or others that take their place.
    """
    home = home_of(variable)
    if home is None:
        return topology.replicated
    if home.kind is VariableKind.ON_READ:
        return topology.stacked
    division: Division | None = getattr(variable, "division", None)
    return topology.replicated if division is None else division.sharding(topology)


def put_stored(variable: Any, value: Any, topology: Topology) -> Any:
    """Returns a value as a variable stores it, where each replica has a copy.

    Args:
        variable: of a strategy.
        value: array, the same on all processes.
        topology: the devices of its strategy.
    """
    division: Division | None = getattr(variable, "division", None)
    if division is None:
        return topology.replicate(value)
    return put_shards(value, division.sharding(topology))

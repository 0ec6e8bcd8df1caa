"""Which variables of a model are kept where."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stratagem.context.explicit_device import explicit_device
from stratagem.execution import is_worth_rows
from stratagem.messages import explain
from stratagem.placement import AtLeastBytes
from stratagem.strategies.pinned_state import PINNED_HOST, if_worth_bringing, pinned_parts
from stratagem.topology import Topology, find_devices
from stratagem.variables import Keeping, OnOneDevice, OverReplicas, keeping_of

__all__ = ["CENTRAL", "PlacementRules", "SERVER", "places_with_replicas"]

MIRRORED, CENTRAL, SHARDED, SERVER = "mirrored", "central", "sharded", "server"


def places_with_replicas(placement: Any, topology: Topology) -> dict[str, Keeping | None]:
    """Returns the places that replicas' devices reach by themselves.

    Args:
        placement: places by rules, as somebody gave it.
        topology: the devices of the replicas.

    Raises:
        ValueError: a rule needs pinned memory, and some device has none.
    """
    asked = [*placement.values()] if isinstance(placement, Mapping) else []
    return {
        MIRRORED: None,
        SHARDED: OverReplicas(topology),
        PINNED_HOST: pinned_parts(topology) if PINNED_HOST in asked else None,
    }


class PlacementRules:
    """Keeps variables by the first rule that matches them; see `HybridStrategy`.

    Args:
        placement: places by rules.
        places: where variables of each place are kept in this process; None for a copy on each
            device, which those have that could be on servers and are not.

    Raises:
        TypeError: no mapping, or a rule of another type.
        ValueError: a place that there is not, or a pattern that is none.

    `placement` is what was given.
    """

    def __init__(self, placement: Any, places: Mapping[str, Keeping | None]) -> None:
        if not isinstance(placement, Mapping):
            raise TypeError(
                explain(
                    f"placement={placement!r} is of type {type(placement).__name__}.",
                    expected="a mapping from patterns of variable paths, or functions of a "
                    "variable, to places.",
                    fix='write placement={"embedding": "sharded"}.',
                )
            )
        self.placement: Mapping[Any, str] = dict(placement)
        self._places = places
        self._rules: list[tuple[Any, Callable[[Any], bool], str]] = []
        for rule, place in placement.items():
            if place not in places:
                raise ValueError(
                    explain(
                        f"placement has the place {place!r} for {rule!r}.",
                        expected=f"one of {', '.join(map(repr, places))}.",
                        fix="use sg.HybridStrategy, on the devices of one process."
                        if place in (CENTRAL, SERVER)
                        else "write one of these.",
                    )
                )
            self._rules.append((rule, _as_function(rule), place))
        # A model without large variables is none that a rule by size was mistaken for.
        self._unused: Sequence[Any] = [
            rule for rule, _, _ in self._rules if not isinstance(rule, AtLeastBytes)
        ]
        self._paths: dict[str, None] = {}

    @property
    def take_devices(self) -> bool:
        """Whether a variable may be on a device that a block of `keras.device` names."""
        return CENTRAL in self._places

    @property
    def need_servers(self) -> bool:
        """Whether some rule sends variables to parameter servers."""
        return any(place == SERVER for _, _, place in self._rules)

    def sends_to_servers(self, variable: Any) -> bool:
        """Tells whether a variable is to be on parameter servers.

        Args:
            variable: with its path, shape and dtype, and no slot.
        """
        return explicit_device() is None and self._place_of(variable) == SERVER

    def choose(self, variable: Any, slot_of: Any) -> Keeping | None:
        """Returns where a variable is kept; what an optimizer keeps for it is there, too."""
        if slot_of is not None:
            return if_worth_bringing(keeping_of(slot_of), variable)
        if (named := explicit_device()) is not None:
            return OnOneDevice(find_devices([named])[0])
        keeping = if_worth_bringing(self._places[self._place_of(variable)], variable)
        _warn_of_copies(variable, keeping)
        return keeping

    def _place_of(self, variable: Any) -> str:
        self._paths[variable.path] = None
        for rule, matches, place in self._rules:
            if matches(variable):
                self._unused = [one for one in self._unused if one is not rule]
                return place
        return MIRRORED

    def check(self) -> None:
        """Raises where a rule has matched no variable."""
        if self._unused and self._paths:
            told = [_told(rule) for rule in self._unused]
            raise ValueError(
                explain(
                    f"placement has rules that match no variable: {', '.join(told)}. The "
                    f"variables are {[*self._paths]}.",
                    expected="rules each of which is the first that matches some variable.",
                    fix="compare the patterns with the paths, and put narrower rules first.",
                )
            )


def _warn_of_copies(variable: Any, keeping: Keeping | None) -> None:
    """Warns of a large variable that was to be parted and has no axis for it."""
    shape = tuple(variable.shape)
    if not isinstance(keeping, OverReplicas) or not is_worth_rows(shape):
        return
    count = keeping.topology.num_replicas
    if keeping.parted_axis(shape) is None:
        warnings.warn(
            explain(
                f"Variable {variable.path!r} of shape {shape} is to be parted over {count} "
                "replicas, and each of them has a copy of it.",
                expected=f"an axis whose size {count} divides.",
                fix=f"make it {-(-shape[0] // count) * count} rows long, for example.",
            ),
            stacklevel=2,
        )


def _told(rule: Any) -> str:
    return repr(rule) if isinstance(rule, str) else getattr(rule, "__qualname__", repr(rule))


def _as_function(rule: Any) -> Callable[[Any], bool]:
    if callable(rule):
        return lambda variable: bool(rule(variable))
    if not isinstance(rule, str):
        raise TypeError(
            explain(
                f"placement has the rule {rule!r} of type {type(rule).__name__}.",
                expected="a pattern of variable paths, or a function of a variable.",
                fix='write "users/embeddings", or sg.placement.at_least_bytes(2**30).',
            )
        )
    try:
        pattern = re.compile(rule)
    except re.error as error:
        raise ValueError(
            explain(
                f"placement has the pattern {rule!r}: {error}.",
                expected="a regular expression, searched in the path of a variable.",
                fix="escape what is meant literally, with re.escape.",
            )
        ) from None
    return lambda variable: pattern.search(variable.path) is not None

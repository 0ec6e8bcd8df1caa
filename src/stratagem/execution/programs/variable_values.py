"""Values of a program's variables: read as its inputs, and replaced by its outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.variables.registry import VariableKind, home_of
from stratagem.variables.store import is_remote, store_of

if TYPE_CHECKING:
    import keras

# Destination of a variable's new value after a step.


class Destination:
    """Destination of a variable's new value after a step."""

    __slots__ = ("_has_devices", "_is_stored", "spec", "variable")

    def __init__(self, variable: keras.Variable, topology: Topology) -> None:
        home = home_of(variable)
        self.variable: Any = variable  # a StoredVariable, or a plain Keras variable
        self._is_stored = home is not None
        self._has_devices = topology.devices is not None
        stacked = home is not None and home.kind is VariableKind.ON_READ
        self.spec = PartitionSpec(topology.replica_axis) if stacked else PartitionSpec()

    @property
    def is_on_devices(self) -> bool:
        """True if the value stays on the replicas' devices between steps."""
        store = store_of(self.variable)
        return store is None or (store.is_on_replicas and not store.is_pinned)

    def store(self, value: object) -> None:
        """Stores the value, with or without a strategy."""
        if self._is_stored:
            self.variable.storage = value
        else:
            # A variable without a strategy remains an array that is not committed to a device.
            self.variable.assign(jax.device_get(value) if self._has_devices else value)


class VariableValues:
    """The values that a step reads, or replaces.

    A step may have thousands of variables. Those with a copy on each device are therefore read and
    set without a call for each.
    """

    def __init__(self, variables: Sequence[Any], topology: Topology) -> None:
        self._variables = variables
        self.places = [Destination(variable, topology) for variable in variables]
        self._are_copies = all(map(_has_copies, variables))

    def read(self, value_of: Callable[[Any], Any]) -> list[Any]:
        """Returns the inputs of a step; `value_of` returns that for a variable without copies."""
        if self._are_copies:
            return [variable.stored for variable in self._variables]
        return [*map(value_of, self._variables)]

    def replace(self, values: Sequence[Any]) -> None:
        """Stores the outputs of a step."""
        if self._are_copies:
            for variable, value in zip(self._variables, values, strict=True):
                variable.stored = value
            return
        for place, value in zip(self.places, values, strict=True):
            place.store(value)


def _has_copies(variable: Any) -> bool:
    """Returns True if `stored` is what steps read and replace."""
    is_elsewhere = home_of(variable) is None or store_of(variable) is not None
    return not is_elsewhere and not is_remote(variable)


def value_for_step(variable: Any) -> Any:
    """Returns a variable's value as input of a step, with or without a strategy."""
    return variable.value if home_of(variable) is None else variable.for_step

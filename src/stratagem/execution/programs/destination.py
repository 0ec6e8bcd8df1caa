"""Destination of a variable's new value after a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from stratagem.contexts import current_function_trace
from stratagem.devices.mesh import Topology
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import home_of
from stratagem.variables.store import store_of

if TYPE_CHECKING:
    import keras


class Destination:
    """Destination of a variable's new value after a step."""

    __slots__ = ("_is_stored", "spec", "variable")

    def __init__(self, variable: keras.Variable, topology: Topology) -> None:
        home = home_of(variable)
        self.variable: Any = variable  # a StoredVariable, or a plain Keras variable
        self._is_stored = home is not None
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
        elif (trace := current_function_trace()) is not None:
            trace.store(self.variable, value)
        else:
            # A variable without a strategy remains an array that is not committed to a device.
            self.variable.assign(jax.device_get(value))

"""Placement: chooses the store of each variable of a strategy."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from stratagem.variables.layouts import Division, VariableLayouts
from stratagem.variables.sharded_store import ShardedStore, SingleDeviceStore, is_worth_sharding
from stratagem.variables.store import Store


class DescribedVariable(Protocol):
    """The part that rules read, of a variable or of a request to create one."""

    @property
    def path(self) -> str:
        """The variable's path in its model."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        ...

    @property
    def dtype(self) -> Any:
        """The variable's dtype."""
        ...


class NewVariable(DescribedVariable, Protocol):
    """A variable of a strategy whose store is chosen, perhaps before it has a value."""

    @property
    def is_large_table(self) -> bool:
        """True for a table of which a step looks up rows."""
        ...


class Placement(Protocol):
    """Chooses a store for each variable of a strategy.

    To write one, inherit from `Replicated` and override `choose`.
    """

    @property
    def uses_stores(self) -> bool:
        """True if `choose` may return a store, so that steps must look for one."""
        ...

    @property
    def layouts(self) -> VariableLayouts | None:
        """Rules that shard a replica's copy over its logical devices, or None."""
        ...

    @property
    def remote(self) -> Any:
        """The `RemoteState` of variables outside this process; None if there are none."""
        ...

    @property
    def is_remote(self) -> bool:
        """True if all variables are stored outside this process."""
        ...

    @property
    def allows_devices(self) -> bool:
        """True if a `keras.device` block may choose the device of a variable."""
        ...

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store of a new variable; None for a copy on each replica's device.

        `variable` has a path, shape and dtype, but no value yet. `slot_of` is the trained variable
        if an optimizer creates a slot for it.
        """
        ...

    def check(self) -> None:
        """Raises ValueError for unused rules and the like. Called when training starts."""
        ...


@dataclasses.dataclass
class Replicated:
    """A copy of every variable on each replica's device, perhaps sharded by `layouts`."""

    layouts: VariableLayouts | None = None

    uses_stores = False
    is_remote = False
    allows_devices = False
    remote: Any = None

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns None."""
        return None

    def check(self) -> None:
        """Accepts everything."""


class UniformPlacement(Replicated):
    """One store for all variables."""

    uses_stores = True

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store."""
        return self.store


class ShardedState(Replicated):
    """Shards of optimizer state ("optimizer", ZeRO-1) or of all model state ("all", FSDP, ZeRO-3).

    A variable whose layout names the replicas is sharded in any case; with None, no other is.
    """

    uses_stores = True

    def __init__(
        self,
        store: ShardedStore,
        shard_state: str | None,
        layouts: VariableLayouts | None = None,
    ) -> None:
        super().__init__(layouts)
        self.store = store
        self.shard_state = shard_state

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store for a variable that is large enough and has an axis to shard."""
        shape = tuple(variable.shape)
        division: Division | None = getattr(variable, "division", None) or self._of_rest(variable)
        store = self.store.divided(division)
        if division is not None and division.replica_axis is not None:
            return store
        is_slot = self.shard_state == "optimizer" and slot_of is not None
        is_wanted = is_slot or self.shard_state == "all"
        can_shard = store.sharded_axis(shape) is not None
        return store if is_wanted and is_worth_sharding(shape) and can_shard else None

    def _of_rest(self, variable: NewVariable) -> Division | None:
        """Returns the division of a variable without a layout, if there are layouts and "all".

        It is sharded over the devices of each replica as well, along its last axis that leaves
        another one for the replicas.
        """
        shape, topology = tuple(variable.shape), self.store.topology
        parts, count = topology.num_logical_devices, topology.num_shards
        layouts = self.layouts if self.shard_state == "all" and parts > 1 else None
        if layouts is None or variable.is_large_table or layouts.covers(variable.path):
            return None
        for axis in reversed(range(len(shape))):
            others = (size for other, size in enumerate(shape) if other != axis)
            if shape[axis] % parts == 0 and any(size and size % count == 0 for size in others):
                names = topology.logical_axes
                return Division(tuple(names if i == axis else () for i in range(len(shape))))
        return None


def sole_device(placement: Placement) -> jax.Device | None:
    """Returns the device that stores all variables; None if a placement has no such device."""
    if isinstance(placement, UniformPlacement) and isinstance(placement.store, SingleDeviceStore):
        return placement.store.device
    return None

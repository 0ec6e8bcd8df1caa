"""Placement: the store of each variable of a strategy."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax

from stratagem.variables.layouts import VariableLayouts
from stratagem.variables.sharded_store import ShardedStore, is_worth_sharding
from stratagem.variables.single_device_store import SingleDeviceStore
from stratagem.variables.store import Store

__all__ = ["Placement", "Replicated", "ShardedState", "UniformPlacement", "sole_device"]


class Placement(Protocol):
    """Chooses a store for each variable of a strategy.

    The simplest way to write one is to inherit from `Replicated` and override `choose`.
    """

    @property
    def uses_stores(self) -> bool:
        """True if `choose` may return a store, so that steps have to look for one."""
        ...

    @property
    def layouts(self) -> VariableLayouts | None:
        """Rules that divide a replica's copy over its logical devices; None for no rules."""
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

    def choose(self, variable: Any, slot_of: Any) -> Store | None:
        """Chooses the store of a new variable.

        Args:
            variable: Keras variable with path, shape and dtype, and no value yet.
            slot_of: the trained variable, if an optimizer creates a slot for it; else None.

        Returns:
            The store; None for a copy on each replica's device.
        """
        ...

    def check(self) -> None:
        """Checks the placement when training starts, when all variables are known.

        Raises:
            ValueError: a rule that no variable matches, for example.
        """
        ...


@dataclasses.dataclass
class Replicated:
    """A copy of every variable on each replica's device.

    Args:
        layouts: rules that divide a replica's copy over its logical devices; None for no rules.
    """

    layouts: VariableLayouts | None = None

    uses_stores = False
    is_remote = False
    allows_devices = False
    remote: Any = dataclasses.field(default=None, init=False)

    def choose(self, variable: Any, slot_of: Any) -> Store | None:
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

    def choose(self, variable: Any, slot_of: Any) -> Store | None:
        """Returns the store."""
        return self.store


class ShardedState(Replicated):
    """Shards of optimizer state (ZeRO-1), or of all of a model's state (FSDP, ZeRO-3).

    Args:
        store: the shards, on the replicas' devices.
        is_all: True to shard the model's variables, too.
    """

    uses_stores = True

    def __init__(self, store: ShardedStore, *, is_all: bool) -> None:
        super().__init__()
        self.store = store
        self.is_all = is_all

    def choose(self, variable: Any, slot_of: Any) -> Store | None:
        """Returns the shards for a variable that is large enough and has an axis to shard."""
        shape = tuple(variable.shape)
        is_wanted = self.is_all or slot_of is not None
        can_shard = self.store.sharded_axis(shape) is not None
        return self.store if is_wanted and is_worth_sharding(shape) and can_shard else None


def sole_device(placement: Placement) -> jax.Device | None:
    """Returns the device that holds all variables; None if a placement has no such device."""
    if isinstance(placement, UniformPlacement) and isinstance(placement.store, SingleDeviceStore):
        return placement.store.device
    return None

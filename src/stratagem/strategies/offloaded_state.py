"""Offloading of large variables to pinned host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.devices.mesh import Topology
from stratagem.messages import explain
from stratagem.variables.placement import Replicated
from stratagem.variables.sharded_store import ShardedStore, is_worth_sharding
from stratagem.variables.single_device_store import SingleDeviceStore
from stratagem.variables.store import Store, store_of

if TYPE_CHECKING:
    from stratagem.variables.placement import NewVariable


# JAX's name of that memory
PINNED_HOST = "pinned_host"


class OffloadedState(Replicated):
    """Large variables in pinned host memory, and lookup tables in ordinary host memory.

    Devices copy whole arrays from pinned memory, not single rows, so tables stay out of it.

    Args:
        store: pinned host memory.
        tables: the store of large tables.
    """

    uses_stores = True

    def __init__(self, store: ShardedStore, tables: SingleDeviceStore) -> None:
        super().__init__()
        self._store = store
        self._tables = tables

    def choose(self, variable: NewVariable, slot_of: object) -> Store | None:
        """Returns the store of a variable; a slot is stored with the variable it belongs to."""
        if slot_of is not None and store_of(slot_of) is not self._store:
            return store_of(slot_of)
        if slot_of is None and variable.is_large_table:
            return self._tables
        return if_worth_offloading(self._store, variable)


def pinned_host_store(topology: Topology) -> ShardedStore:
    """Returns the store of shards in pinned host memory.

    Raises:
        ValueError: a device without such memory.
    """
    # Abstract devices cannot be asked; each process asks its own devices.
    devices: Any = () if topology.is_abstract else topology.local_devices
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED_HOST not in kinds:
            raise ValueError(
                explain(
                    f"{device} has no {PINNED_HOST!r} memory; its memories are {kinds}.",
                    expected="devices with pinned host memory.",
                    fix='store the variables in ordinary host memory: parameter_device="cpu:0" '
                    'of CentralStorageStrategy, or the place "central" of HybridStrategy.',
                )
            )
    return ShardedStore(topology, memory_kind=PINNED_HOST)


def if_worth_offloading(store: Store | None, variable: NewVariable) -> Store | None:
    """Returns a store, but None for a small variable in pinned memory: it stays on the devices."""
    if store is None or not store.is_pinned or is_worth_sharding(tuple(variable.shape)):
        return store
    return None

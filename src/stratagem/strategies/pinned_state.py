"""Variables in the host's pinned memory, from where devices bring them over within their step."""

from __future__ import annotations

from typing import Any

from stratagem.messages import explain
from stratagem.topology import Topology
from stratagem.variables import Keeping, OnOneDevice, OverReplicas, is_worth_parts, keeping_of

__all__ = ["PINNED_HOST", "PinnedState", "if_worth_bringing", "pinned_parts"]

# JAX's own name of that memory.
PINNED_HOST = "pinned_host"


class PinnedState:
    """Keeps all that is large in pinned memory; tables that rows are looked up in on the host.

    No device can take single rows out of pinned memory: it would bring tables over whole.

    Args:
        parts: in pinned memory.
        tables: where large tables are.
    """

    def __init__(self, parts: OverReplicas, tables: OnOneDevice) -> None:
        self._parts = parts
        self._tables = tables

    def choose(self, variable: Any, slot_of: Any) -> Keeping | None:
        """Returns where a variable is kept; what an optimizer keeps for it is there, too."""
        if slot_of is not None and keeping_of(slot_of) is not self._parts:
            return keeping_of(slot_of)
        if slot_of is None and variable.is_large_table:
            return self._tables
        return if_worth_bringing(self._parts, variable)

    def check(self) -> None:
        """Does nothing."""


def pinned_parts(topology: Topology) -> OverReplicas:
    """Returns the keeping of parts in pinned memory.

    Args:
        topology: the devices of the replicas.

    Raises:
        ValueError: a device that does not know such memory.
    """
    # Of devices that are only planned for nobody knows; those of other processes they ask.
    devices: Any = () if topology.is_absent else topology.local_devices
    for device in devices:
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED_HOST not in kinds:
            raise ValueError(
                explain(
                    f"{PINNED_HOST!r} was asked for, and {device} knows the memories {kinds}.",
                    expected="devices whose host has pinned memory for them.",
                    fix='keep the variables on the host otherwise: parameter_device="cpu:0" of '
                    'CentralStorageStrategy, the place "central" of HybridStrategy.',
                )
            )
    return OverReplicas(topology, memory_kind=PINNED_HOST)


def if_worth_bringing(keeping: Keeping | None, variable: Any) -> Keeping | None:
    """Returns where a variable is kept: what is small stays on the devices.

    Args:
        keeping: where it would be.
        variable: with its shape.
    """
    if keeping is None or not keeping.is_pinned or is_worth_parts(tuple(variable.shape)):
        return keeping
    return None

"""The replicas of a step, as its collectives see them."""

from __future__ import annotations

import dataclasses

from stratagem.topology import Topology
from stratagem.topology.mesh import REPLICA_AXIS
from stratagem.topology.slices import num_slices, slice_of

__all__ = ["ReplicaAxis"]


@dataclasses.dataclass(frozen=True)
class ReplicaAxis:
    """A mesh axis.

    Args:
        name: of the axis.
        size: number of replicas.
        groups: replicas that are near each other, in groups of one size; () where there are none.
        adds_wide: whether bfloat16 is added as float32, which XLA:CPU does by itself, but ends the
            process over it where a replica has several devices (JAX 0.10 to 0.12).
    """

    name: str
    size: int
    groups: tuple[tuple[int, ...], ...] = ()
    adds_wide: bool = False

    @staticmethod
    def of(topology: Topology) -> ReplicaAxis:
        """Returns the axis of the replicas of a strategy.

        Args:
            topology: its devices. Those of one slice form a group; where all belong to one, those
                of one process; and where all belong to one of these, too, the first half and the
                second, as on a machine with two sockets.
        """
        size = topology.num_replicas
        devices = topology.devices or ()
        in_slices = num_slices(devices) > 1
        members: dict[int, list[int]] = {}
        for replica_id, device in enumerate(devices):
            near = slice_of(device) if in_slices else device.process_index
            members.setdefault(near, []).append(replica_id)
        groups = [tuple(group) for group in members.values()]
        if len(groups) == 1 and size >= 4 and size % 2 == 0:
            groups = [tuple(range(size // 2)), tuple(range(size // 2, size))]
        is_nested = 1 < len(groups) < size and len({len(group) for group in groups}) == 1
        adds_wide = topology.groups is not None and topology.platform == "cpu"
        return ReplicaAxis(REPLICA_AXIS, size, tuple(groups) if is_nested else (), adds_wide)

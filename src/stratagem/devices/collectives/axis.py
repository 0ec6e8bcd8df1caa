"""`ReplicaAxis`: the mesh axis that collectives reduce over, and groups of nearby replicas."""

from __future__ import annotations

import dataclasses

from stratagem.devices.mesh import Topology
from stratagem.devices.tpu_coordinates import num_slices, slice_of


@dataclasses.dataclass(frozen=True)
class ReplicaAxis:
    """The mesh axis of the replicas.

    Args:
        name: name of the axis, or names of two.
        size: number of replicas that are combined.
        groups: groups of nearby replicas, all of one size; () if there are none.
        adds_wide: True to add bfloat16 in float32. XLA:CPU normally does so itself, but crashes if
            replicas have several devices (JAX 0.10 to 0.12).
        apart: groups of `size` replicas, each combined on its own; () for all replicas together.

    Example:
        >>> sg.collectives.ReplicaAxis.of(sg.MirroredStrategy(["cpu:0", "cpu:1"]).topology).size
        2

    Source: specific to Stratagem.
    """

    name: str | tuple[str, ...]
    size: int
    groups: tuple[tuple[int, ...], ...] = ()
    adds_wide: bool = False
    apart: tuple[tuple[int, ...], ...] = ()

    @property
    def index_groups(self) -> list[list[int]] | None:
        """The argument `axis_index_groups` of the functions of `jax.lax`."""
        return [list(group) for group in self.apart] or None

    @staticmethod
    def of(topology: Topology) -> ReplicaAxis:
        """Returns the replica axis of a topology.

        Replicas of one slice form a group; with a single slice, those of one process; with a single
        process, its first and second half, as on a machine with two sockets.
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
        # JAX has no groups within several axes.
        is_nested = (
            topology.shard_size is None
            and 1 < len(groups) < size
            and len({len(group) for group in groups}) == 1
        )
        adds_wide = topology.groups is not None and topology.platform == "cpu"
        return ReplicaAxis(
            topology.replica_axis, size, tuple(groups) if is_nested else (), adds_wide
        )

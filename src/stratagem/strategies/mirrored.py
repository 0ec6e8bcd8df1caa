"""Mirrored variables: synchronous training on this process's devices, one replica each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from stratagem.devices.finding import DeviceLike
from stratagem.strategies.base.argument_checks import checked_sequence_axis
from stratagem.strategies.base.cross_device_ops import CrossDeviceOps
from stratagem.strategies.base.strategy import Strategy, recreatable
from stratagem.strategies.membership import local_topology
from stratagem.strategies.placement import state_placement
from stratagem.variables.layouts import groups_of_mesh


@final
class MirroredStrategy(Strategy):
    """Trains one model on several devices in lockstep, each with its own copy of the variables.

    Each replica computes on its part of a batch; gradients are summed over replicas, so that
    all copies get the same update. A replica may have several devices, its logical devices; its
    copy and its computation are then sharded over them.

    Args:
        devices: names such as `"gpu:0"`, indices or `jax.Device`s, one per replica, or a list of
            them per replica; None for those of the mesh of `layout_map` or, without one, every
            local accelerator or, without any, every local CPU device. Missing CPU devices are
            created, if JAX has not started.
        cross_device_ops: how gradients are combined; None lets the compiler choose.
        shard_state: state sharded over the replicas' devices: "optimizer" for optimizer slots
            (ZeRO-1), "all" for the weights, too, which a step then gathers (FSDP, ZeRO-3); None for
            nothing. The results are the same.
        shard_size: number of adjacent replicas that store one copy of the sharded state, such as
            those of a machine; other replicas store further copies (HSDP). None for all replicas.
        layout_map: how variables are sharded over the devices of a replica, and over the replicas:
            a `keras.distribution.LayoutMap` or a dict from patterns of paths to tuples such as
            `("replica", "logical")`. Optimizer slots are sharded like their variable. The batch
            axis of a LayoutMap's mesh, "batch", "data" or the first, stands for the replicas.
        devices_per_replica: number of adjacent devices per replica; None for one, or those of the
            mesh of `layout_map`.
        sequence_axis: axis of a step's arrays, such as 1 for (batch, sequence, ...), that is split
            over the devices of a replica (sequence or context parallelism); None for no axis.

    Raises:
        ValueError: an empty list; an unknown, repeated or remote device; groups of unequal size;
            `NcclAllReduce` on CPUs; an unknown `shard_state`; a `shard_size` that does not divide
            the replicas, or with nothing sharded; a layout with another axis; a
            `devices_per_replica` that does not divide the devices, or beside groups; a
            `sequence_axis` of 0, or with replicas of one device.
        TypeError: invalid `cross_device_ops`, or devices or layouts of another type.

    Example:
        >>> sg.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        2
        >>> sg.MirroredStrategy(
        ...     ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
        ...     devices_per_replica=2,
        ...     layout_map={".*/kernel": (None, "logical")},
        ...     shard_state="all",
        ... ).num_replicas_in_sync
        2

    Source: TF 2.21 mirrored_strategy.py, MirroredStrategy.
    """

    @recreatable
    def __init__(
        self,
        devices: Sequence[DeviceLike] | Sequence[Sequence[DeviceLike]] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        shard_state: str | None = None,
        shard_size: int | None = None,
        layout_map: Mapping[str, Any] | None = None,
        devices_per_replica: int | None = None,
        sequence_axis: int | None = None,
    ) -> None:
        if devices is None and devices_per_replica is None:
            devices = groups_of_mesh(layout_map)
        topology = local_topology(devices, name="devices", devices_per_replica=devices_per_replica)
        topology = topology.with_shard_size(shard_size)
        self.sequence_axis = checked_sequence_axis(sequence_axis, topology)
        super().__init__(
            topology,
            cross_device_ops,
            placement=state_placement(topology, shard_state=shard_state, layout_map=layout_map),
        )

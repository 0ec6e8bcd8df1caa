"""Synchronous strategies on this process's devices: mirrored, one device, central storage.

`CompileOnlyStrategy` has the devices of a description, and compiles programs without running them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, final

import jax

from stratagem.devices.finding import DeviceLike, find_devices
from stratagem.devices.mesh import Topology
from stratagem.errors import explain
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.strategies.argument_checks import checked_sequence_axis
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.strategies.membership import local_topology, parameter_device_of
from stratagem.strategies.placement import (
    PINNED_HOST,
    OffloadedState,
    pinned_host_store,
    state_placement,
)
from stratagem.strategies.strategy import Strategy, recreatable
from stratagem.variables.layouts import groups_of_mesh
from stratagem.variables.placement import Placement, SingleDeviceStore, UniformPlacement


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


@final
class OneDeviceStrategy(Strategy):
    """Puts variables and computation on one device.

    For code that opens a scope but should run undistributed, and for testing a program before it is
    distributed.

    Args:
        device: a name such as `"gpu:0"`, an index, or a `jax.Device`.

    Raises:
        ValueError: no such device.
        TypeError: a device of another type.

    Example:
        >>> sg.OneDeviceStrategy("cpu:0").num_replicas_in_sync
        1

    Source: TF 2.21 one_device_strategy.py, OneDeviceStrategy.
    """

    @recreatable
    def __init__(self, device: DeviceLike) -> None:
        super().__init__(Topology(find_devices([device])))


@final
class CentralStorageStrategy(Strategy):
    """Trains one model on several devices in lockstep, with one copy of the variables on the host.

    In each step the replicas fetch the values that they read and return summed gradients; the
    optimizer update runs where the variables and their slots are stored. So a device needs
    memory for values and gradients, but not for slots.

    With `parameter_device="pinned_host"` the copy is in pinned host memory, which devices access
    directly. Each device holds a shard of every variable there; within the step it copies the shard
    in, updates it and copies it back. A step is then one program, and many steps are one call.
    Variables of less than 1,024 elements are replicated on the devices then, and large tables with
    lookups of rows stay in ordinary host memory.

    Args:
        compute_devices: names such as `"gpu:0"`, indices or `jax.Device`s, one per replica; None
            for every local accelerator or, without any, every local CPU device.
        parameter_device: device of the variables; None for the only accelerator, or the host if
            there are several; "pinned_host" for pinned host memory.

    Raises:
        ValueError: an empty list; an unknown, repeated or remote device; devices without pinned
            host memory.
        TypeError: devices of another type.

    Example:
        >>> sg.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:0").num_replicas_in_sync
        2

    Source: TF 2.21 central_storage_strategy.py, CentralStorageStrategy.
    """

    @recreatable
    def __init__(
        self,
        compute_devices: Sequence[DeviceLike] | None = None,
        parameter_device: DeviceLike | None = None,
    ) -> None:
        topology = local_topology(compute_devices, name="compute_devices")
        super().__init__(topology, placement=_placement(topology, parameter_device))


def _placement(topology: Topology, parameter_device: DeviceLike | None) -> Placement:
    if parameter_device == PINNED_HOST:
        tables = SingleDeviceStore(parameter_device_of(None))
        return OffloadedState(pinned_host_store(topology), tables)
    if parameter_device is None and topology.devices and len(topology.devices) == 1:
        parameter_device = topology.devices[0]
    return UniformPlacement(SingleDeviceStore(parameter_device_of(parameter_device)))


@final
class CompileOnlyStrategy(Strategy):
    """One replica per abstract device, such as the 256 chips of a TPU slice.

    Variables created in its scope have a shape and no value, so that a model of any size takes no
    memory. `stratagem.keras.lower_training_step` lowers the step of `fit`.

    Args:
        devices: devices in replica order, for example from
            `jax.experimental.topologies.get_topology_desc`.
        cross_device_ops: how gradients are combined; None chooses as on real devices.

    Raises:
        ValueError: no device.
        TypeError: an argument of another type.

    Source: JAX, ahead-of-time lowering and compilation (jax.experimental.topologies).
    """

    def __init__(
        self, devices: Sequence[jax.Device], cross_device_ops: CrossDeviceOps | None = None
    ) -> None:
        super().__init__(Topology(tuple(devices)), cross_device_ops, executor=CompileOnly)


class CompileOnly(Lockstep):
    """Executor that lowers and compiles programs for abstract devices."""

    has_values = False

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
        """Raises a RuntimeError: programs cannot run."""
        raise RuntimeError(
            explain(
                f"run was called on the {self._strategy.num_replicas_in_sync} devices of a "
                "CompileOnlyStrategy.",
                expected="programs that are only lowered and compiled: the devices are not here.",
                fix="lower the step, or use a strategy of devices that are here.",
            )
        )

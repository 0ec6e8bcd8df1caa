"""Synchronous strategies: mirrored on one or many workers, one device, central storage.

`CompileOnlyStrategy` has the devices of a description, and compiles programs without running them.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NoReturn, final

import jax

from stratagem import environment
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions
from stratagem.devices.finding import DeviceLike, find_devices, planned_topology
from stratagem.devices.mesh import Topology, adjacent_groups
from stratagem.devices.shared_sums import connect_memory
from stratagem.errors import check_type, explain
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.current import agree_on_random_state
from stratagem.strategies.cross_device_ops import AutomaticOps, CrossDeviceOps
from stratagem.strategies.logical_devices import checked_sequence_axis
from stratagem.strategies.membership import (
    devices_of_cluster,
    local_topology,
    parameter_device_of,
    resolver_of,
)
from stratagem.strategies.placement import (
    PINNED_HOST,
    OffloadedState,
    pinned_host_store,
    state_placement,
)
from stratagem.strategies.strategy import Strategy, recreatable
from stratagem.variables.layouts import devices_per_replica_of, groups_of_mesh
from stratagem.variables.placement import Replicated, SingleDeviceStore, UniformPlacement


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


def _placement(topology: Topology, parameter_device: DeviceLike | None) -> Replicated:
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


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Trains one model on the devices of several processes in lockstep, each with its own copy.

    Every process runs the same program. They find each other by `TF_CONFIG`, or by the environment
    variables of their launcher; without either this is `MirroredStrategy()`. Create it before any
    other use of JAX.

    Args:
        cluster_resolver: the cluster and this process's task; None reads the environment.
        communication_options: algorithm and timeout of communication between processes; the first
            strategy of a process decides.
        devices_per_replica: number of neighboring devices of a process per replica; None for one,
            or as many as the mesh of `layout_map` has beside its batch axis.
        shard_state: as for `MirroredStrategy`, over the replicas of all processes.
        shard_size: as for `MirroredStrategy`; with the replicas of a machine, only sums of
            gradients are sent between machines.
        layout_map: as for `MirroredStrategy`; of a LayoutMap's mesh only the shape is used.
        placement: "mirrored", "sharded" or "pinned_host" by rule, as for `HybridStrategy`.
        sequence_axis: as for `MirroredStrategy`.
        allow_unauthenticated: True to run on several hosts without a secret, on a network that only
            they can reach.

    Raises:
        ValueError: an invalid cluster, a task that does not train, processes that do not match,
            several hosts without a secret, a number that does not divide the devices; and as for
            `MirroredStrategy` and `HybridStrategy`.
        TypeError: an argument of another type.
        DeadlineExceededError: not all processes came in time; the message names the missing ones.
        RuntimeError: JAX has started already.

    Example:
        >>> strategy = sg.MultiWorkerMirroredStrategy()  # no cluster: as MirroredStrategy()
        >>> strategy.cluster_resolver.task_type is None
        True

    Source: TF 2.21 collective_all_reduce_strategy.py, CollectiveAllReduceStrategy.
    """

    _is_copyable = False

    @recreatable
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        *,
        devices_per_replica: int | None = None,
        shard_state: str | None = None,
        shard_size: int | None = None,
        layout_map: Mapping[str, Any] | None = None,
        placement: Mapping[str | Callable[[Any], bool], str] | None = None,
        sequence_axis: int | None = None,
        allow_unauthenticated: bool = False,
    ) -> None:
        wanted, kind = "sg.CommunicationOptions, or None", CommunicationOptions | None
        check_type("communication_options", communication_options, kind, wanted, error=ValueError)
        self._options = options = communication_options or CommunicationOptions()
        self._tf_config = environment.lookup("TF_CONFIG")
        self._resolver = resolver_of(cluster_resolver)
        devices, is_cluster = devices_of_cluster(
            self._resolver, options.timeout_seconds, allow_unauthenticated=allow_unauthenticated
        )
        if devices_per_replica is None:
            devices_per_replica = devices_per_replica_of(layout_map)
        groups = adjacent_groups(devices, devices_per_replica)
        topology = planned_topology(Topology.of_groups(groups)).with_shard_size(shard_size)
        self.sequence_axis = checked_sequence_axis(sequence_axis, topology)
        is_open = options.implementation is CommunicationImplementation.AUTO
        if is_open and topology.groups is None:
            connect_memory(topology)
        super().__init__(
            topology,
            AutomaticOps(options, between_processes=True),
            placement=state_placement(
                topology, shard_state=shard_state, layout_map=layout_map, placement=placement
            ),
        )
        if is_cluster:
            agree_on_random_state()

    @contextlib.contextmanager
    def scope(self) -> Generator[Strategy]:
        """Makes this strategy current, as `Strategy.scope` does; warns if `TF_CONFIG` changed.

        Yields:
            The strategy.

        Source: TensorFlow issue 31154.
        """
        if environment.lookup("TF_CONFIG") != self._tf_config:
            warnings.warn(
                explain(
                    "TF_CONFIG has changed since this strategy was made.",
                    expected="the cluster that the strategy was made for: it is read once.",
                    fix="set TF_CONFIG before the strategy is made.",
                ),
                stacklevel=3,
            )
        with super().scope():
            yield self

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster."""
        return self._resolver

    @property
    def communication_options(self) -> CommunicationOptions:
        """Algorithm and timeout of communication between processes."""
        return self._options


CollectiveAllReduceStrategy = MultiWorkerMirroredStrategy

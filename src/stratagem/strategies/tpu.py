"""TPU strategy: synchronous training on TPU chips, one replica each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, final

from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.abstract_devices import planned_topology
from stratagem.devices.device_assignment import DeviceAssignment
from stratagem.devices.groups import adjacent_groups
from stratagem.devices.mesh import Topology
from stratagem.devices.tpu_coordinates import assigned_devices, in_ring_order
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.random_state import agree_on_random_state
from stratagem.messages import explain
from stratagem.strategies.base.argument_checks import (
    check_device_assignment,
    check_steps_per_run,
    checked_sequence_axis,
    refuse_both_groupings,
)
from stratagem.strategies.base.automatic import AutomaticOps
from stratagem.strategies.base.recreate import recreatable
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.membership import check_resolver, copy_refused
from stratagem.strategies.state_placement import state_placement
from stratagem.strategies.tpu_system import find_resolver, tpu_devices
from stratagem.variables.mesh_axes import devices_per_replica_of


@final
class TPUStrategy(Strategy):
    """Trains one model on the chips of one or more TPU slices, each with its own copy.

    Every host runs the same program. `STRATAGEM_TPU_PLATFORM=cpu` selects CPU devices, so that
    you can try a program without a TPU. Create it before any other use of JAX.

    Args:
        tpu_cluster_resolver: the TPU's hosts; None reads the environment, and falls back to the TPU
            of this machine.
        experimental_device_assignment: the device or devices (logical devices) of each replica;
            None for one replica per device, the devices of each host in a ring of neighbors.
        experimental_spmd_xla_partitioning: makes `assign_to_logical_device` an error, as in
            TensorFlow; computations are always divided by SPMD partitioning.
        steps_per_run: number of steps per call on the devices, unless `Model.compile` gets
            `steps_per_execution` or `run_steps` a number.
        shard_state: as for `MirroredStrategy`.
        shard_size: as for `MirroredStrategy`; with the replicas of a slice, only sums of gradients
            are sent between slices.
        layout_map: as for `MirroredStrategy`; of a LayoutMap's mesh only the shape is used.
        placement: "mirrored", "sharded" or "pinned_host" by rule, as for `HybridStrategy`.
        devices_per_replica: number of neighboring devices of a host per replica, in place of a
            device assignment; None for one, or as many as the mesh of `layout_map` has beside its
            batch axis.
        sequence_axis: as for `MirroredStrategy`.

    Raises:
        NotFoundError: no TPU.
        ValueError: an invalid argument; a TPU with more hosts than the resolver names.
        DeadlineExceededError: not all hosts came in time; the message names the missing ones.
        RuntimeError: JAX has started already, and the TPU has several hosts.

    Example:
        >>> strategy = sg.TPUStrategy(steps_per_run=8)  # with STRATAGEM_TPU_PLATFORM=cpu
        >>> strategy.num_replicas_in_sync == jax.device_count()
        True

    Source: TF 2.21 tpu_strategy.py, TPUStrategyV2; TF 1.x tpu_strategy.py, steps_per_run.
    """

    @recreatable
    def __init__(
        self,
        tpu_cluster_resolver: ClusterResolver | None = None,
        experimental_device_assignment: DeviceAssignment | None = None,
        experimental_spmd_xla_partitioning: bool = False,
        *,
        steps_per_run: int | None = None,
        shard_state: str | None = None,
        shard_size: int | None = None,
        layout_map: Mapping[str, Any] | None = None,
        placement: Mapping[str | Callable[[Any], bool], str] | None = None,
        devices_per_replica: int | None = None,
        sequence_axis: int | None = None,
    ) -> None:
        check_resolver(tpu_cluster_resolver, "tpu_cluster_resolver")
        check_device_assignment(experimental_device_assignment)
        check_steps_per_run(steps_per_run)
        if not isinstance(experimental_spmd_xla_partitioning, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                explain(
                    "experimental_spmd_xla_partitioning="
                    f"{experimental_spmd_xla_partitioning!r} is no bool.",
                    expected="True or False.",
                    fix="leave it out.",
                )
            )
        self._resolver = find_resolver(tpu_cluster_resolver)
        devices = tpu_devices(self._resolver)
        refuse_both_groupings(experimental_device_assignment, devices_per_replica)
        if experimental_device_assignment is not None:
            groups = assigned_devices(experimental_device_assignment, devices)
        else:
            if devices_per_replica is None:
                devices_per_replica = devices_per_replica_of(layout_map)
            groups = adjacent_groups(in_ring_order(devices), devices_per_replica)
        topology = planned_topology(Topology.of_groups(groups)).with_shard_size(shard_size)
        self.sequence_axis = checked_sequence_axis(sequence_axis, topology)
        self.refuses_assignment = experimental_spmd_xla_partitioning
        self.device_assignment = experimental_device_assignment
        super().__init__(
            topology,
            AutomaticOps(),
            placement=state_placement(
                topology, shard_state=shard_state, layout_map=layout_map, placement=placement
            ),
            executor=functools.partial(Lockstep, steps_per_call=steps_per_run),
        )
        if self.topology.spans_processes:
            agree_on_random_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        if self.topology.spans_processes:
            raise copy_refused(self)
        return super().__deepcopy__(memo)

    @property
    def steps_per_run(self) -> int | None:
        """Default number of steps per call on the devices."""
        return self.executor.steps_per_call

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the TPU's hosts."""
        return self._resolver

"""TPU strategy: synchronous training on TPU chips, one replica each."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping
from typing import Any, final

import jax

from stratagem import settings
from stratagem.cluster.detection import detect
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.tpu import TPUClusterResolver
from stratagem.devices.device_assignment import (
    DeviceAssignment,
    assigned_devices,
    in_ring_order,
    tpu_topology_of,
)
from stratagem.devices.finding import local_devices, planned_devices, planned_topology
from stratagem.devices.mesh import Topology, adjacent_groups
from stratagem.devices.tpu_topology import TPUTopology
from stratagem.errors import NotFoundError, check_number, check_type, explain, invalid
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.current import agree_on_random_state
from stratagem.strategies.cross_device_ops import AutomaticOps
from stratagem.strategies.logical_devices import checked_sequence_axis
from stratagem.strategies.membership import check_resolver, join
from stratagem.strategies.placement import state_placement
from stratagem.strategies.strategy import Strategy, recreatable
from stratagem.variables.layouts import devices_per_replica_of

# TPU system: finding the TPU, starting JAX on all its hosts, freeing its memory.


def initialize_tpu_system(cluster_resolver: ClusterResolver | None = None) -> TPUTopology:
    """Finds the TPU, starts JAX on all its hosts, and returns the positions of its devices.

    `TPUStrategy` does the same by itself. Call it on every host, before any other use of JAX. Later
    calls are harmless: JAX starts a TPU once, and nothing is lost.

    Args:
        cluster_resolver: the TPU's hosts; None reads the environment.

    Returns:
        The topology, with several slices stacked along z.

    Raises:
        NotFoundError: no TPU.
        ValueError: a resolver of another type, or one that does not name all hosts.

    Example:
        >>> sg.tpu.initialize_tpu_system().num_tasks  # with STRATAGEM_TPU_PLATFORM=cpu
        1

    Source: TF 2.21 tpu_strategy_util.py, initialize_tpu_system.
    """
    check_resolver(cluster_resolver, "cluster_resolver")
    return tpu_topology_of(tpu_devices(find_resolver(cluster_resolver)))


def shutdown_tpu_system(cluster_resolver: ClusterResolver | None = None) -> None:
    """Drops all compiled programs to free their device memory.

    JAX holds the devices until the process ends; arrays and variables stay.

    Args:
        cluster_resolver: the TPU's hosts; None reads the environment.

    Raises:
        NotFoundError: no TPU.
        ValueError: a resolver of another type.

    Example:
        >>> topology = sg.tpu.initialize_tpu_system()
        >>> sg.tpu.shutdown_tpu_system()

    Source: TF 2.21 tpu_strategy_util.py, shutdown_tpu_system.
    """
    check_resolver(cluster_resolver, "cluster_resolver")
    tpu_devices(find_resolver(cluster_resolver))
    jax.clear_caches()
    gc.collect()


def find_resolver(cluster_resolver: ClusterResolver | None) -> ClusterResolver:
    """Returns the given resolver, or one from the environment.

    Without any, the TPU is in this machine alone.
    """
    return cluster_resolver or detect() or TPUClusterResolver("local")


def tpu_devices(resolver: ClusterResolver) -> tuple[jax.Device, ...]:
    """Returns the devices of the TPU, grouped by process, after joining its other hosts.

    They are CPU devices if `STRATAGEM_TPU_PLATFORM` is "cpu".

    Raises:
        NotFoundError: there is no TPU.
        ValueError: the TPU has more hosts than the resolver names.
    """
    if (planned := planned_devices()) is not None:
        return planned
    platform = settings.read("tpu_platform")
    processes = resolver.processes()
    try:
        if processes.num_processes > 1:
            devices = join(resolver, processes)
        else:
            local_devices()
            devices = tuple(jax.devices(platform))
    except RuntimeError as error:
        if "backend" not in str(error):  # JAX's error for a missing platform
            raise
        raise _not_found(platform, str(error)) from error
    if devices[0].platform != platform:
        raise _not_found(platform, f"JAX uses the platform {devices[0].platform!r}.")
    num_hosts = len({device.process_index for device in devices})
    if num_hosts != processes.num_processes:
        raise invalid(
            f"The TPU has {num_hosts} hosts, and the resolver tells of {processes.num_processes}.",
            expected="a resolver that names all of them: no environment variable does.",
            fix='pass sg.cluster_resolver.TPUClusterResolver("the TPU\'s name").',
        )
    return devices


def _not_found(platform: str, why: str) -> NotFoundError:
    return NotFoundError(
        explain(
            f"This machine has no {platform.upper()} that JAX can use: {why}",
            expected="a TPU host with jax[tpu] installed, on which no other program uses the TPU.",
            fix="see docs/guides/tpu.md; to try the program without a TPU, set "
            "STRATAGEM_TPU_PLATFORM=cpu and JAX_NUM_CPU_DEVICES=8.",
            code="SG106",
        )
    )


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
        _check_device_assignment(experimental_device_assignment)
        check_number("TPUStrategy", or_none=True, steps_per_run=steps_per_run)
        name = "experimental_spmd_xla_partitioning"
        check_type(name, experimental_spmd_xla_partitioning, bool, "True or False")
        self._resolver = find_resolver(tpu_cluster_resolver)
        devices = tpu_devices(self._resolver)
        if experimental_device_assignment is not None:
            if devices_per_replica is not None:
                raise invalid(
                    f"devices_per_replica={devices_per_replica!r} and a device assignment were "
                    "given.",
                    expected="at most one of them: each groups the devices.",
                    fix="leave one of them out.",
                )
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
        self._is_copyable = not self.topology.spans_processes
        if self.topology.spans_processes:
            agree_on_random_state()

    @property
    def steps_per_run(self) -> int | None:
        """Default number of steps per call on the devices."""
        return self.executor.steps_per_call

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the TPU's hosts."""
        return self._resolver


def _check_device_assignment(assignment: object) -> None:
    """Raises a ValueError unless a TPUStrategy got a device assignment or None."""
    if isinstance(assignment, int):
        raise invalid(
            f"experimental_device_assignment={assignment} is a number.",
            expected="an sg.tpu.DeviceAssignment; in TensorFlow 1, the steps per "
            "call were in its place.",
            fix=f"write steps_per_run={assignment}.",
        )
    fix = "make one with DeviceAssignment.build(topology, num_replicas=...)."
    wanted, kind = "an sg.tpu.DeviceAssignment, or None", DeviceAssignment | None
    check_type("experimental_device_assignment", assignment, kind, wanted, fix, error=ValueError)

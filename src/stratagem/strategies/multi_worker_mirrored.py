"""Mirrored variables in many processes: synchronous training, one replica per device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any, NoReturn, final

from stratagem import environment
from stratagem.cluster.detection import detect
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.devices.abstract_devices import planned_topology
from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions
from stratagem.devices.mesh import Topology, adjacent_groups
from stratagem.devices.shared_sums import connect_memory
from stratagem.errors import explain
from stratagem.group.current import agree_on_random_state
from stratagem.strategies.argument_checks import checked_communication, checked_sequence_axis
from stratagem.strategies.cross_device_ops import AutomaticOps
from stratagem.strategies.membership import check_resolver, copy_refused, devices_of_cluster
from stratagem.strategies.placement import state_placement
from stratagem.strategies.strategy import Strategy, recreatable
from stratagem.variables.layouts import devices_per_replica_of


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
        check_resolver(cluster_resolver, "cluster_resolver")
        options = checked_communication(communication_options)
        self._options = options
        self._tf_config = environment.lookup("TF_CONFIG")
        self._resolver = cluster_resolver or detect() or TFConfigClusterResolver()
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

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise copy_refused(self)

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

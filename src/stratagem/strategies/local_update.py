"""Local updates: replicas train apart, and synchronize every few steps."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Literal, final

from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.communication import CommunicationOptions
from stratagem.devices.finding import DeviceLike, planned_topology
from stratagem.devices.local_updates import Islands, LocalSGD, LocalUpdates
from stratagem.devices.mesh import Topology
from stratagem.errors import check_type, explain, invalid
from stratagem.group.current import agree_on_random_state
from stratagem.strategies.cross_device_ops import AutomaticOps
from stratagem.strategies.membership import devices_of_cluster, local_topology, resolver_of
from stratagem.strategies.strategy import Strategy, recreatable

# Islands of a topology: the replicas that train in lockstep, from the user's argument.


def islands_of(topology: Topology, replicas_per_island: object) -> Islands:
    """Returns the islands of a topology.

    Args:
        topology: the devices of the replicas, those of a process one after the other.
        replicas_per_island: number of replicas of an island, or "process" for those of a process.

    Raises:
        TypeError: an argument of another type.
        ValueError: islands of unequal size; an island that has a part of a process besides others;
            replicas of several devices.
    """
    count = topology.num_replicas
    of_processes = _replicas_of_processes(topology)
    size = replicas_per_island
    if size == "process":
        sizes = set(of_processes)
        if len(sizes) > 1:
            raise invalid(
                f'replicas_per_island="process" with processes of {of_processes} replicas.',
                expected="the same number of replicas on each process: islands are averaged "
                "with equal weights.",
                fix="give each process as many devices, or pass replicas_per_island=1.",
            )
        size = of_processes[0]
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(_unexpected(size, count, f"is of type {type(size).__name__}"))
    if size < 1 or count % size:
        raise ValueError(_unexpected(size, count, f"does not divide {count} replicas"))
    if any(size % own and own % size for own in of_processes):
        raise invalid(
            f"replicas_per_island={size} with processes of {of_processes} replicas.",
            expected="islands of whole processes, or processes of whole islands: lockstep is "
            "for the fast links.",
            fix='pass "process", or a divisor or multiple of the replicas of a process.',
        )
    if 1 < size < count and topology.groups is not None:
        raise invalid(
            f"replicas_per_island={size} with replicas of several devices.",
            expected="replicas of one device each.",
            fix="pass a flat list of devices, or replicas_per_island=1.",
        )
    return Islands(count, size)


def _replicas_of_processes(topology: Topology) -> list[int]:
    if topology.devices is None:
        return [topology.num_replicas]
    counts = collections.Counter(device.process_index for device in topology.devices)
    return list(counts.values())


def _unexpected(size: object, count: int, what: str) -> str:
    return explain(
        f"replicas_per_island={size!r} {what}.",
        expected=f'a divisor of the {count} replicas, or "process".',
        fix='pass "process" to train in lockstep on the devices of each machine.',
    )


# Islands send rarely, over links where each message may take long: copies cost less than messages.
_BYTES_PER_PACK = 2**24


@final
class LocalUpdateStrategy(Strategy):
    """Trains a copy of the model on each replica, and synchronizes the copies every few steps.

    For slow links between machines: a synchronization sends as much as one step in lockstep, and
    there is one every `period` steps. The replicas are the devices of all processes of the cluster,
    which are found as by `MultiWorkerMirroredStrategy`, or those given.

    With `replicas_per_island`, replicas train in lockstep within an island, as under
    `MirroredStrategy`, and islands synchronize every few steps: for machines of several devices.

    A variable holds the global model: outside of replica functions, in `evaluate`, `predict` and in
    files. In a training step it stands for the replica's own weights. The optimizer's state is each
    replica's own; files have its mean. `optimizer.iterations` counts the steps of a replica.

    Args:
        method: `sg.local_updates.LocalSGD()` or `DiLoCo()`; None for `LocalSGD()`.
        devices: devices of this process, one per replica; None for those of the cluster.
        replicas_per_island: number of consecutive replicas that train in lockstep, or "process" for
            all replicas of a process. If that is all replicas, there are no local updates.
        cluster_resolver: the cluster and this process's task; None reads the environment.
        allow_unauthenticated: as for `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: devices and a cluster resolver; islands that do not fit the replicas or the
            processes; and as for `MultiWorkerMirroredStrategy`.
        TypeError: a method or a number of replicas of another type.

    Example:
        >>> strategy = sg.LocalUpdateStrategy(
        ...     sg.local_updates.DiLoCo(period=50), devices=["cpu:0", "cpu:1"]
        ... )
        >>> strategy.num_replicas_in_sync, strategy.local_updates.period
        (2, 50)

        Two islands of two replicas:

        >>> devices = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
        >>> sg.LocalUpdateStrategy(devices=devices, replicas_per_island=2).num_islands
        2

    Source: Stich, Local SGD converges fast and communicates little, 2019; Douillard et al., DiLoCo,
    2023.
    """

    _is_copyable = False

    @recreatable
    def __init__(
        self,
        method: LocalUpdates | None = None,
        devices: Sequence[DeviceLike] | None = None,
        *,
        replicas_per_island: int | Literal["process"] = 1,
        cluster_resolver: ClusterResolver | None = None,
        allow_unauthenticated: bool = False,
    ) -> None:
        fix = "pass sg.local_updates.DiLoCo(period=50), for example."
        wanted = "a method of sg.local_updates, or None"
        check_type("method", method, LocalUpdates | None, wanted, fix)
        self.local_updates = method or LocalSGD()
        self._resolver = resolver_of(cluster_resolver)
        is_cluster = False
        if devices is not None:
            if cluster_resolver is not None:
                raise invalid(
                    f"devices={devices!r} and a cluster resolver were given.",
                    expected="at most one of them: devices are those of one process.",
                    fix="leave one of them out.",
                )
            topology = local_topology(devices, name="devices")
        else:
            found, is_cluster = devices_of_cluster(
                self._resolver, None, allow_unauthenticated=allow_unauthenticated
            )
            topology = planned_topology(Topology(found))
        self._num_islands = 1
        islands = islands_of(topology, replicas_per_island)
        if islands.count > 1:
            self.islands, self._num_islands = islands, islands.count
        super().__init__(
            topology, AutomaticOps(CommunicationOptions(bytes_per_pack=_BYTES_PER_PACK))
        )
        if is_cluster:
            agree_on_random_state()

    @property
    def num_islands(self) -> int:
        """The number of groups of replicas that train apart."""
        return self._num_islands

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster."""
        return self._resolver

"""Parts of a parameter-server strategy in each kind of process: coordinator, worker, other."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.execution import Executor, Lockstep
from stratagem.messages import explain
from stratagem.partitioners import Partitioner
from stratagem.servers import Connections, LostUpdates, ServerClient, ShardPlacer, UpdateMode
from stratagem.strategies.non_training import NonTraining
from stratagem.strategies.remote_steps import RemoteSteps
from stratagem.strategies.served_cluster import Cluster
from stratagem.strategies.variable_client import VariableClient
from stratagem.topology import Topology, find_devices, local_devices
from stratagem.topology.devices import DeviceLike
from stratagem.variables import Replicated

__all__ = [
    "ProcessParts",
    "Scheduling",
    "connect",
    "coordinator_parts",
    "independent_parts",
    "non_training_parts",
    "worker_parts",
]


@dataclasses.dataclass
class ProcessParts:
    """Topology, placement and executor of one process, and its connections."""

    topology: Topology
    placement: Replicated
    executor: Callable[[Any], Executor] = Lockstep
    cluster: Cluster | None = None
    connections: Connections | None = None


class RemotePlacement(Replicated):
    """All variables on parameter servers."""

    is_remote = True

    def __init__(self, remote: RemoteSteps) -> None:
        super().__init__()
        self.remote = remote


class Scheduling(Lockstep):
    """Executor of the coordinator, whose `ClusterCoordinator` runs steps on workers."""

    schedules = True

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy)
        self.coordinator: Any = None

    def run(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function in the coordinator, with a warning."""
        warnings.warn(
            explain(
                "strategy.run was called in the coordinator, and runs there.",
                expected="functions that run on workers.",
                fix="call it in a function that is given to ClusterCoordinator.schedule.",
            ),
            RuntimeWarning,
            stacklevel=4,
        )
        return super().run(fn, args, kwargs)


class IndependentWorker(Lockstep):
    """Executor of a worker that runs its own program."""

    def __init__(self, strategy: Any, worker: tuple[int, int]) -> None:
        super().__init__(strategy)
        self.worker = worker


def connect(cluster: Cluster, silence_s: float | None) -> Connections:
    """Connects to the servers of a cluster.

    `silence_s` is the time without a sign of life after which a server is lost; None for the
    default.
    """
    addresses, locate = cluster.server_addresses, cluster.locate_server
    return Connections(cluster.keys, addresses, locate=locate, silence_s=silence_s)


def coordinator_parts(
    cluster: Cluster,
    partitioner: Partitioner | None,
    mode: UpdateMode,
    silence_s: float | None,
) -> ProcessParts:
    """Returns the parts of the coordinator, which creates all variables."""
    connections = connect(cluster, silence_s)
    cluster.tell_moves_to(connections.move)
    variables = VariableClient(
        ServerClient(connections),
        ShardPlacer(len(cluster.server_addresses), partitioner),
        mode,
        has_journals=cluster.has_journals,
        is_coordinator=True,
    )
    return ProcessParts(
        Topology(local_devices()[:1]),
        RemotePlacement(RemoteSteps(variables, 1)),
        Scheduling,
        cluster,
        connections,
    )


def worker_parts(
    client: ServerClient,
    index: int,
    mode: UpdateMode,
    devices: Sequence[DeviceLike] | None = None,
    *,
    placer: ShardPlacer | None = None,
    has_journals: bool = False,
) -> ProcessParts:
    """Returns the parts of a worker.

    Args:
        client: connected to the servers.
        index: index of the worker.
        mode: when the servers apply gradients.
        devices: devices of its replicas; None for all local ones.
        placer: places the variables it creates; None if the coordinator creates them.
        has_journals: True if the servers keep journals of the variables it creates.
    """
    found = local_devices() if devices is None else find_devices(list(devices))
    topology = Topology(found, first_replica_id=index * len(found))
    variables = VariableClient(client, placer, mode, has_journals=has_journals)
    steps = RemoteSteps(variables, len(found), repeats_stale=mode.max_staleness is not None)
    return ProcessParts(topology, RemotePlacement(steps))


def independent_parts(
    cluster: Cluster,
    worker: int,
    num_workers: int,
    partitioner: Partitioner | None,
    mode: UpdateMode,
    devices: Sequence[DeviceLike] | None = None,
    *,
    silence_s: float | None = None,
) -> ProcessParts:
    """Returns the parts of a worker that runs its own program.

    All workers create the same variables in the same order: the first creates them on the servers,
    the others find them there.
    """
    connections = connect(cluster, silence_s)
    parts = worker_parts(
        ServerClient(connections, f"worker {worker}"),
        worker,
        mode,
        devices,
        placer=ShardPlacer(len(cluster.server_addresses), partitioner),
        has_journals=cluster.has_journals,
    )
    parts.placement.remote.lost_updates = LostUpdates(worker)
    parts.executor = functools.partial(IndependentWorker, worker=(worker, num_workers))
    parts.cluster, parts.connections = cluster, connections
    return parts


def non_training_parts(task: tuple[str | None, int | None]) -> ProcessParts:
    """Returns the parts of a task that does not train."""
    executor = functools.partial(NonTraining, task=task)
    return ProcessParts(Topology(local_devices()[:1]), Replicated(), executor)

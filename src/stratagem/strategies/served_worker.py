"""What a strategy with parameter servers is on a worker, scheduled or with a program of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stratagem.partitioners import Partitioner
from stratagem.servers import Connections, LostUpdates, Placer, ServedVariables, UpdateMode
from stratagem.strategies.served_cluster import Cluster
from stratagem.strategies.served_steps import ServedSteps
from stratagem.strategies.serving import Serving
from stratagem.strategies.strategy import Strategy
from stratagem.topology import Topology, find_devices, local_devices
from stratagem.topology.devices import DeviceLike

__all__ = ["begin_independent", "begin_on_worker", "connected"]


def connected(cluster: Cluster, silence_s: float | None) -> Connections:
    """Returns connections to the servers of a cluster.

    Args:
        cluster: the cluster.
        silence_s: how long a server may give no sign of life; None for the default.
    """
    addresses, locate = cluster.server_addresses, cluster.locate_server
    return Connections(cluster.keys, addresses, locate=locate, silence_s=silence_s)


def begin_on_worker(
    strategy: Any,
    client: ServedVariables,
    index: int,
    mode: UpdateMode,
    *,
    devices: Sequence[DeviceLike] | None = None,
    placer: Placer | None = None,
    has_journals: bool = False,
) -> None:
    """Lets a strategy take its place in a worker.

    Args:
        strategy: with which nothing was done yet.
        client: of the servers.
        index: of the worker.
        mode: when the servers apply gradients.
        devices: of its replicas; None for all local ones.
        placer: chooses where variables are that it makes; None if the coordinator makes them.
        has_journals: whether it has the servers write down what it has made.
    """
    found = local_devices() if devices is None else find_devices(list(devices))
    Strategy.__init__(strategy, Topology(found))
    strategy.coordinator = None
    strategy.serving = Serving(client, placer, mode, has_journals=has_journals)
    strategy.exchange = ServedSteps(
        strategy.serving,
        strategy.num_replicas_in_sync,
        repeats_stale=mode.max_staleness is not None,
    )
    strategy.first_replica_id = index * strategy.num_replicas_in_sync


def begin_independent(
    strategy: Any,
    cluster: Cluster,
    worker: int,
    partitioner: Partitioner | None,
    mode: UpdateMode,
    devices: Sequence[DeviceLike] | None = None,
    *,
    num_workers: int = 1,
    silence_s: float | None = None,
) -> Connections:
    """Lets a strategy take its place in a cluster, as a worker with a program of its own.

    All workers make the same variables in the same order: the first one makes them on the servers,
    the others find them there.

    Args:
        strategy: with which nothing was done yet.
        cluster: the cluster.
        worker: its id there.
        partitioner: which variables are split; None for none.
        mode: when the servers apply gradients.
        devices: of its replicas; None for all local ones.
        num_workers: how many there are.
        silence_s: how long a server may give no sign of life; None for the default.

    Returns:
        Its connections to the servers.
    """
    connections = connected(cluster, silence_s)
    client = ServedVariables(connections, f"worker {worker}")
    strategy.cluster = cluster
    placer = Placer(len(cluster.server_addresses), partitioner)
    begin_on_worker(
        strategy,
        client,
        worker,
        mode,
        devices=devices,
        placer=placer,
        has_journals=cluster.has_journals,
    )
    strategy.exchange.lost_updates = LostUpdates(worker)
    strategy.place = worker, num_workers
    return connections

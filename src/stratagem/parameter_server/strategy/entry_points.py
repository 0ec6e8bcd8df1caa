"""Entry points of servers and workers; importing them imports all that models need."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import jax

from stratagem.devices.finding import DeviceLike
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.journal_folders import sweep_journals
from stratagem.launch.remote.ray.ray_cluster import own_host
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.cluster.cluster_plan import (
    Cluster,
    ClusterPlan,
    EntryPoints,
    JournalPlan,
)
from stratagem.parameter_server.cluster.coordinated_cluster import CoordinatedCluster
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.parameter_server.cluster.shared_cluster import SharedCluster
from stratagem.parameter_server.coordinator.worker import Worker
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.parameter_server.strategy.process_parts import worker_parts


def start_cluster(plan: ClusterPlan) -> Cluster:
    """Starts the servers of a planned cluster, or joins it as an independent worker."""
    entry_points = EntryPoints(serve_server, serve_worker)
    return (SharedCluster if plan.task else CoordinatedCluster)(plan, entry_points)


def serve_server(index: int, keys: ClusterKeys, journals: JournalPlan) -> ParameterServer:
    """Starts a parameter server in this process; creates the journal folder if missing."""
    _compute_inline()
    folder = Path(journals.folder)
    if journals.is_temporary:
        sweep_journals(folder.parent)
    return ParameterServer(
        keys,
        host=own_host(),
        journal=folder / f"server-{index}.journal",
        journal_interval_s=journals.interval_s,
        is_durable=journals.is_durable,
        removes_journal=journals.is_temporary,
    )


def serve_worker(index: int, keys: ClusterKeys) -> Worker:
    """Starts a worker in this process."""
    _compute_inline()
    return make_worker(keys, host=own_host())


def make_worker(
    keys: ClusterKeys,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    devices: Sequence[DeviceLike] | None = None,
) -> Worker:
    """Returns a worker with a replica on each of `devices`; None for all local ones."""
    make_strategy = functools.partial(_worker_strategy, devices=devices)
    return Worker(keys, KERAS_PACKING, make_strategy, host=host, port=port)


def _worker_strategy(
    client: ServerClient,
    index: int,
    mode: UpdateMode,
    *,
    devices: Sequence[DeviceLike] | None,
) -> RemoteStateStrategy:
    return RemoteStateStrategy(worker_parts(client, index, mode, devices))


def _compute_inline() -> None:
    """Makes CPU computations run in the calling thread, which waits for them anyway."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)

"""Entry points of the processes of a cluster; importing them loads all that models need."""

from __future__ import annotations

from pathlib import Path

import jax

from stratagem.coordinator import Worker
from stratagem.remote.ray.ray_cluster import own_host
from stratagem.servers import ClusterKeys, ParameterServer

__all__ = ["serve_server", "serve_worker"]


def serve_server(
    index: int, keys: ClusterKeys, journal_dir: str, journal_interval_s: float
) -> ParameterServer:
    """Starts a parameter server in this process, which Ray started.

    Args:
        index: index of the server.
        keys: keys of the cluster.
        journal_dir: folder of its journal; created if missing.
        journal_interval_s: seconds between entries of the journal.

    Returns:
        The server.
    """
    _compute_inline()
    journal = Path(journal_dir) / f"server-{index}.journal"
    return ParameterServer(
        keys, host=own_host(), journal=journal, journal_interval_s=journal_interval_s
    )


def serve_worker(index: int, keys: ClusterKeys) -> Worker:
    """Starts a worker in this process, which Ray started."""
    _compute_inline()
    return Worker(keys, host=own_host())


def _compute_inline() -> None:
    """Makes CPU computations run in the calling thread, which waits for the result anyway."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)

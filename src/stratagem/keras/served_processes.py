"""What runs in the processes of a cluster: to find it there loads what models need."""

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
    """Starts a parameter server in this process, which Ray has started.

    Args:
        index: of the server.
        keys: of the cluster.
        journal_dir: the folder of its journal, which is made.
        journal_interval_s: how long to wait after each entry.

    Returns:
        The server.
    """
    _compute_inline()
    journal = Path(journal_dir) / f"server-{index}.journal"
    return ParameterServer(
        keys, host=own_host(), journal=journal, journal_interval_s=journal_interval_s
    )


def serve_worker(index: int, keys: ClusterKeys) -> Worker:
    """Starts a worker in this process, which Ray has started.

    Args:
        index: of the worker.
        keys: of the cluster.

    Returns:
        The worker.
    """
    _compute_inline()
    return Worker(keys, host=own_host())


def _compute_inline() -> None:
    """Has the CPU compute in the thread that asks, which waits for the result anyway."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)

"""What runs in the processes of a cluster: to find it there loads what models need."""

from __future__ import annotations

from stratagem.coordinator import Worker
from stratagem.coordinator.ray_cluster import own_host
from stratagem.servers import ClusterKeys, ParameterServer

__all__ = ["serve_server", "serve_worker"]


def serve_server(index: int, keys: ClusterKeys) -> ParameterServer:
    """Starts a parameter server in this process, which Ray has started.

    Args:
        index: of the server.
        keys: of the cluster.

    Returns:
        The server.
    """
    return ParameterServer(keys, host=own_host())


def serve_worker(index: int, keys: ClusterKeys) -> Worker:
    """Starts a worker in this process, which Ray has started; otherwise as `serve_server`."""
    return Worker(keys, host=own_host())

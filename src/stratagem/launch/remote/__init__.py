"""Remote clusters: servers that join a Ray cluster, and clients that send it programs.

Nothing here loads JAX or Keras.
"""

from stratagem.launch.remote.remote_cluster import RemoteCluster, connect_to_cluster
from stratagem.launch.remote.server import Server, ServerDef, run_standard_server

__all__ = ["RemoteCluster", "Server", "ServerDef", "connect_to_cluster", "run_standard_server"]

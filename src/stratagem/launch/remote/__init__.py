"""Remote clusters: servers that join a Ray cluster, and clients that send it programs.

Nothing here loads JAX or Keras.
"""

from stratagem.launch.remote.remote_cluster import RemoteCluster
from stratagem.launch.remote.remote_cluster import connect_to_cluster as connect_to_cluster
from stratagem.launch.remote.server import Server as Server
from stratagem.launch.remote.server import ServerDef as ServerDef
from stratagem.launch.remote.server import run_standard_server as run_standard_server

__all__ = ["RemoteCluster"]

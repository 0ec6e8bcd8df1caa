"""Launching the tasks of a cluster, on this machine or several: start, watch, restart, stop.

Nothing here loads JAX or Keras, except the fork server in its own process.
"""

from stratagem.launch.functions import RemoteError, run, spawn
from stratagem.launch.options import ElasticConfig, LaunchOptions

__all__ = ["ElasticConfig", "LaunchOptions", "RemoteError", "run", "spawn"]

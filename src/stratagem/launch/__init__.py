"""Launching the tasks of a cluster, on this machine or several: start, watch, restart, stop.

Nothing here loads JAX or Keras, except the fork server in its own process.
"""

from stratagem.launch.functions import RemoteError, run, spawn
from stratagem.launch.options import ElasticConfig as ElasticConfig
from stratagem.launch.options import LaunchOptions

__all__ = ["LaunchOptions", "RemoteError", "run", "spawn"]

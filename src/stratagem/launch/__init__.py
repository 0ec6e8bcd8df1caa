"""Starts the tasks of a cluster on this machine, watches them, and ends them.

Nothing here loads JAX or Keras.
"""

from stratagem.launch.functions import spawn
from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.scripts import RemoteError, run

__all__ = ["ElasticConfig", "LaunchOptions", "RemoteError", "run", "spawn"]

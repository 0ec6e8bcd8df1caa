"""Public names of `sg.coordinator`, after `tf.distribute.coordinator`."""

from stratagem.parameter_server.cluster_plan import CoordinatorOptions
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.coordinator.remote_value import RemoteValue
from stratagem.parameter_server.coordinator.shipping import PerWorkerValues
from stratagem.parameter_server.coordinator.worker import (
    cache_variable_reads,
    get_current_worker_index,
)

options = CoordinatorOptions

__all__ = [
    "ClusterCoordinator",
    "PerWorkerValues",
    "RemoteValue",
    "cache_variable_reads",
    "get_current_worker_index",
    "options",
]

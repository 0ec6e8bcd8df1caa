"""Functions that are scheduled on the workers of a cluster with parameter servers."""

from stratagem.coordinator.closures import Closure, ClosureQueue
from stratagem.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.coordinator.packing import Packing, Resource, packing, set_packing
from stratagem.coordinator.per_worker import PerWorkerDataset, PerWorkerValues
from stratagem.coordinator.remote_value import RemoteValue, RemoteValueStatus
from stratagem.coordinator.served_cluster import ServedCluster
from stratagem.coordinator.shared_cluster import SharedCluster
from stratagem.coordinator.worker import Worker, cache_variable_reads, get_current_worker_index
from stratagem.strategies import CoordinatorOptions, set_cluster_maker

options = CoordinatorOptions
set_cluster_maker(lambda plan: SharedCluster(plan) if plan.task else ServedCluster(plan))

__all__ = [
    "Closure",
    "ClosureQueue",
    "ClusterCoordinator",
    "CoordinatorOptions",
    "Packing",
    "PerWorkerDataset",
    "PerWorkerValues",
    "RemoteValue",
    "RemoteValueStatus",
    "Resource",
    "ServedCluster",
    "SharedCluster",
    "Worker",
    "cache_variable_reads",
    "get_current_worker_index",
    "options",
    "packing",
    "set_packing",
]

"""Cluster specifications, task roles, and resolvers that detect them. Loads no JAX."""

from stratagem.cluster.accelerators import TPUSystemMetadata
from stratagem.cluster.detection import ENVIRONMENTS, detect
from stratagem.cluster.kubernetes_services import resolve_cluster
from stratagem.cluster.processes import Processes, check_cluster, processes_of_task
from stratagem.cluster.resolvers import (
    ClusterResolver,
    GCEClusterResolver,
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
    ProcessClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TPUClusterResolver,
    UnionResolver,
)
from stratagem.cluster.resolvers.slurm import expand_hostlist, expand_tasks_per_node
from stratagem.cluster.roles import (
    TASK_TYPES,
    collective_leader,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    task_count,
    worker_count,
)
from stratagem.cluster.spec import ClusterDef, ClusterSpec, JobDef

__all__ = [
    "ClusterDef",
    "ClusterResolver",
    "ClusterSpec",
    "ENVIRONMENTS",
    "GCEClusterResolver",
    "JobDef",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "ProcessClusterResolver",
    "Processes",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TASK_TYPES",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "TPUSystemMetadata",
    "UnionResolver",
    "check_cluster",
    "collective_leader",
    "detect",
    "expand_hostlist",
    "expand_tasks_per_node",
    "id_in_cluster",
    "is_chief",
    "normalize_cluster_spec",
    "processes_of_task",
    "resolve_cluster",
    "task_count",
    "worker_count",
]

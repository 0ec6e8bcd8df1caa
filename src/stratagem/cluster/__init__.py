"""Cluster specifications, task roles, and resolvers that detect them. Loads no JAX."""

from stratagem.cluster.accelerators import TPUSystemMetadata
from stratagem.cluster.detection import ENVIRONMENTS, detect
from stratagem.cluster.kubernetes_services import resolve_cluster
from stratagem.cluster.processes import Processes, check_cluster, processes_of_task
from stratagem.cluster.resolvers.gce import GCEClusterResolver
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.sagemaker import SageMakerClusterResolver
from stratagem.cluster.resolvers.simple import ProcessClusterResolver, SimpleClusterResolver
from stratagem.cluster.resolvers.slurm import (
    SlurmClusterResolver,
    expand_hostlist,
    expand_tasks_per_node,
)
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.cluster.resolvers.tpu import TPUClusterResolver
from stratagem.cluster.resolvers.union import UnionResolver
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

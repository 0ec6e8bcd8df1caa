"""Public names: what type checkers see, and the table from which `__init__.py` loads them."""

from stratagem.cluster.accelerators import TPUSystemMetadata as TPUSystemMetadata
from stratagem.cluster.detection import detect as detect
from stratagem.cluster.processes import Processes as Processes
from stratagem.cluster.resolvers.gce import GCEClusterResolver as GCEClusterResolver
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
from stratagem.cluster.resolvers.kubernetes import resolve_cluster as resolve_cluster
from stratagem.cluster.resolvers.resolver import ClusterResolver as ClusterResolver
from stratagem.cluster.resolvers.simple import ProcessClusterResolver as ProcessClusterResolver
from stratagem.cluster.resolvers.simple import SimpleClusterResolver as SimpleClusterResolver
from stratagem.cluster.resolvers.simple import UnionResolver as UnionResolver
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver as SlurmClusterResolver
from stratagem.cluster.resolvers.tf_config import (
    SageMakerClusterResolver as SageMakerClusterResolver,
)
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from stratagem.cluster.resolvers.tpu import TPUClusterResolver as TPUClusterResolver
from stratagem.cluster.roles import collective_leader as collective_leader
from stratagem.cluster.roles import id_in_cluster as id_in_cluster
from stratagem.cluster.roles import is_chief as is_chief
from stratagem.cluster.roles import normalize_cluster_spec as normalize_cluster_spec
from stratagem.cluster.roles import task_count as task_count
from stratagem.cluster.roles import worker_count as worker_count
from stratagem.cluster.spec import ClusterDef as ClusterDef
from stratagem.cluster.spec import ClusterSpec as ClusterSpec
from stratagem.cluster.spec import JobDef as JobDef

"""Public names: what type checkers see, and the table from which `__init__.py` loads them."""

from stratagem.cluster.resolvers.gce import GCEClusterResolver as GCEClusterResolver
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver as KubernetesClusterResolver,
)
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesExecutableLocation as KubernetesExecutableLocation,
)
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

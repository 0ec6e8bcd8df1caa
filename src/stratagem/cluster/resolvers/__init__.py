"""Cluster resolvers, one per environment."""

from stratagem.cluster.resolvers.gce import GCEClusterResolver
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.sagemaker import SageMakerClusterResolver
from stratagem.cluster.resolvers.simple import ProcessClusterResolver, SimpleClusterResolver
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver
from stratagem.cluster.resolvers.tpu import TPUClusterResolver
from stratagem.cluster.resolvers.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "GCEClusterResolver",
    "KubernetesClusterResolver",
    "KubernetesExecutableLocation",
    "ProcessClusterResolver",
    "SageMakerClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]

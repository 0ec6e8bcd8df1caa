"""Distributed training for Keras 3 on JAX: `tf.distribute.Strategy` without TensorFlow.

Importing this package loads neither JAX nor Keras; it selects Keras's JAX backend unless another
one was chosen. Import it before Keras.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stratagem import environment as _environment
from stratagem import host_memory as _host_memory
from stratagem import logs as _logs
from stratagem.old_names import OLD_NAMES as _OLD_NAMES
from stratagem.public_names import PUBLIC_NAMES as _PUBLIC

if TYPE_CHECKING:
    from stratagem import checkpoint as checkpoint
    from stratagem import cluster as cluster
    from stratagem import collectives as collectives
    from stratagem import compression as compression
    from stratagem import config as config
    from stratagem import coordinator as coordinator
    from stratagem import embedding as embedding
    from stratagem import errors as errors
    from stratagem import estimator as estimator
    from stratagem import goodput as goodput
    from stratagem import input as input
    from stratagem import launch as launch
    from stratagem import local_updates as local_updates
    from stratagem import nn as nn
    from stratagem import partitioners as partitioners
    from stratagem import placement as placement
    from stratagem import planning as planning
    from stratagem import preemption as preemption
    from stratagem import profiling as profiling
    from stratagem import remote as remote
    from stratagem import summary as summary
    from stratagem import tpu as tpu
    from stratagem import train as train
    from stratagem.checkpoint import Checkpoint as Checkpoint
    from stratagem.checkpoint import CheckpointManager as CheckpointManager
    from stratagem.checkpoint import PreemptionCheckpointHandler as PreemptionCheckpointHandler
    from stratagem.cluster import ClusterSpec as ClusterSpec
    from stratagem.cluster import resolvers as cluster_resolver
    from stratagem.communication import CollectiveCommunication as CollectiveCommunication
    from stratagem.communication import CollectiveHints as CollectiveHints
    from stratagem.communication import CommunicationImplementation as CommunicationImplementation
    from stratagem.communication import CommunicationOptions as CommunicationOptions
    from stratagem.compat import experimental as experimental
    from stratagem.context import ReplicaContext as ReplicaContext
    from stratagem.context import all_gather as all_gather
    from stratagem.context import experimental_set_strategy as experimental_set_strategy
    from stratagem.context import get_replica_context as get_replica_context
    from stratagem.context import get_strategy as get_strategy
    from stratagem.context import has_strategy as has_strategy
    from stratagem.context import in_cross_replica_context as in_cross_replica_context
    from stratagem.context import set_strategy as set_strategy
    from stratagem.estimator import feature_column as feature_column
    from stratagem.execution import explain_recompiles as explain_recompiles
    from stratagem.execution import function as function
    from stratagem.execution import value_and_grad as value_and_grad
    from stratagem.input import DistributedDataset as DistributedDataset
    from stratagem.input import DistributedIterator as DistributedIterator
    from stratagem.keras import BackupAndRestore as BackupAndRestore
    from stratagem.keras import DatasetCreator as DatasetCreator
    from stratagem.keras import SidecarEvaluator as SidecarEvaluator
    from stratagem.keras import SidecarEvaluatorModelExport as SidecarEvaluatorModelExport
    from stratagem.keras import TensorBoard as TensorBoard
    from stratagem.keras import Variable as Variable
    from stratagem.keras import apply_gradients as apply_gradients
    from stratagem.keras import compile as compile
    from stratagem.keras import compute_average_loss as compute_average_loss
    from stratagem.keras import generate_stream as generate_stream
    from stratagem.keras import profile as profile
    from stratagem.keras import remat as remat
    from stratagem.keras import scale_regularization_loss as scale_regularization_loss
    from stratagem.keras import scan_layers as scan_layers
    from stratagem.launch import ElasticConfig as ElasticConfig
    from stratagem.options import AutoShardPolicy as AutoShardPolicy
    from stratagem.options import InputContext as InputContext
    from stratagem.options import InputOptions as InputOptions
    from stratagem.options import InputReplicationMode as InputReplicationMode
    from stratagem.options import ReduceOp as ReduceOp
    from stratagem.options import RunOptions as RunOptions
    from stratagem.options import ValueContext as ValueContext
    from stratagem.options import VariableAggregation as VariableAggregation
    from stratagem.options import VariableSynchronization as VariableSynchronization
    from stratagem.parameter_server.strategy.parameter_server_strategy import (
        ParameterServerStrategy as ParameterServerStrategy,
    )
    from stratagem.planning import plan as plan
    from stratagem.preemption import PreemptionWatcher as PreemptionWatcher
    from stratagem.preemption import TerminationConfig as TerminationConfig
    from stratagem.remote import Server as Server
    from stratagem.remote import connect_to_cluster as connect_to_cluster
    from stratagem.remote import run_standard_server as run_standard_server
    from stratagem.remote import run_standard_server as run_standard_tensorflow_server
    from stratagem.strategies.base.automatic import CompressedAllReduce as CompressedAllReduce
    from stratagem.strategies.base.built_in_ops import (
        HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
    )
    from stratagem.strategies.base.built_in_ops import NcclAllReduce as NcclAllReduce
    from stratagem.strategies.base.built_in_ops import (
        ReductionToOneDevice as ReductionToOneDevice,
    )
    from stratagem.strategies.base.built_in_ops import RingAllReduce as RingAllReduce
    from stratagem.strategies.base.cross_device_ops import CrossDeviceOps as CrossDeviceOps
    from stratagem.strategies.base.extended import StrategyExtended as StrategyExtended
    from stratagem.strategies.base.strategy import Strategy as Strategy
    from stratagem.strategies.central_storage import (
        CentralStorageStrategy as CentralStorageStrategy,
    )
    from stratagem.strategies.elastic import ElasticStrategy as ElasticStrategy
    from stratagem.strategies.hybrid import HybridStrategy as HybridStrategy
    from stratagem.strategies.local_update import LocalUpdateStrategy as LocalUpdateStrategy
    from stratagem.strategies.mirrored import MirroredStrategy as MirroredStrategy
    from stratagem.strategies.multi_worker_mirrored import (
        CollectiveAllReduceStrategy as CollectiveAllReduceStrategy,
    )
    from stratagem.strategies.multi_worker_mirrored import (
        MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
    )
    from stratagem.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
    from stratagem.strategies.tpu import TPUStrategy as TPUStrategy
    from stratagem.values import DistributedValues as DistributedValues
    from stratagem.values import IndexedSlices as IndexedSlices
    from stratagem.values import Mirrored as Mirrored
    from stratagem.values import PerReplica as PerReplica
    from stratagem.values import regroup as regroup
    from stratagem.values import select_replica as select_replica
    from stratagem.variables import ShardedVariable as ShardedVariable

__version__ = "0.1.0"

__all__ = [
    "AutoShardPolicy",
    "BackupAndRestore",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterSpec",
    "CollectiveAllReduceStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CompressedAllReduce",
    "CrossDeviceOps",
    "DatasetCreator",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "ElasticConfig",
    "ElasticStrategy",
    "HierarchicalCopyAllReduce",
    "HybridStrategy",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "LocalUpdateStrategy",
    "Mirrored",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "PerReplica",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "RunOptions",
    "Server",
    "ShardedVariable",
    "SidecarEvaluator",
    "SidecarEvaluatorModelExport",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "TensorBoard",
    "TerminationConfig",
    "ValueContext",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "all_gather",
    "apply_gradients",
    "checkpoint",
    "cluster",
    "cluster_resolver",
    "collectives",
    "compile",
    "compression",
    "compute_average_loss",
    "config",
    "connect_to_cluster",
    "coordinator",
    "embedding",
    "errors",
    "estimator",
    "experimental",
    "experimental_set_strategy",
    "explain_recompiles",
    "feature_column",
    "function",
    "generate_stream",
    "get_replica_context",
    "get_strategy",
    "goodput",
    "has_strategy",
    "in_cross_replica_context",
    "input",
    "launch",
    "local_updates",
    "nn",
    "partitioners",
    "placement",
    "plan",
    "planning",
    "preemption",
    "profile",
    "profiling",
    "regroup",
    "remat",
    "remote",
    "run_standard_server",
    "run_standard_tensorflow_server",
    "scale_regularization_loss",
    "scan_layers",
    "select_replica",
    "set_strategy",
    "summary",
    "tpu",
    "train",
    "value_and_grad",
]

_ROOMS_WITHOUT_JAX = (
    "cluster",
    "communication",
    "compression",
    "config",
    "errors",
    "goodput",
    "launch",
    "local_updates",
    "options",
    "partitioners",
    "placement",
    "preemption",
    "remote",
)

_environment.select_keras_backend()
_logs.attach_handler()
_host_memory.keep_freed_memory()


def __getattr__(name: str) -> Any:
    if name in _OLD_NAMES:
        raise AttributeError(
            f"module 'stratagem' has no attribute {name!r}\nExpected a name of this library.\n"
            f"Fix: use {_OLD_NAMES[name]}."
        )
    if name not in _PUBLIC:
        raise AttributeError(f"module 'stratagem' has no attribute {name!r}")
    module_name, attribute = _PUBLIC[name]
    if module_name.split(".")[1] not in _ROOMS_WITHOUT_JAX:
        # Every name that needs JAX also needs the Keras integration and the default strategy.
        importlib.import_module("stratagem.keras")
    module = importlib.import_module(module_name)
    value = module if attribute is None else getattr(module, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)  # what completion offers

"""Public names: what type checkers see, and the table from which the root loads them."""

from stratagem import checkpoint as checkpoint
from stratagem import cluster as cluster
from stratagem import config as config
from stratagem import errors as errors
from stratagem import estimator as estimator
from stratagem import input as input
from stratagem import launch as launch
from stratagem import planning as planning
from stratagem.checkpoint.checkpoint import Checkpoint as Checkpoint
from stratagem.checkpoint.manager import CheckpointManager as CheckpointManager
from stratagem.checkpoint.preemption import (
    PreemptionCheckpointHandler as PreemptionCheckpointHandler,
)
from stratagem.cluster import preemption as preemption
from stratagem.cluster import resolvers as _resolvers
from stratagem.cluster.preemption.configuration import PreemptionWatcher as PreemptionWatcher
from stratagem.cluster.preemption.configuration import TerminationConfig as TerminationConfig
from stratagem.cluster.spec import ClusterSpec as ClusterSpec
from stratagem.contexts import experimental_set_strategy as experimental_set_strategy
from stratagem.contexts import get_strategy as get_strategy
from stratagem.contexts import has_strategy as has_strategy
from stratagem.contexts import in_cross_replica_context as in_cross_replica_context
from stratagem.contexts import set_strategy as set_strategy
from stratagem.devices import compression as compression
from stratagem.devices import local_updates as local_updates
from stratagem.devices.communication import CollectiveCommunication as CollectiveCommunication
from stratagem.devices.communication import CollectiveHints as CollectiveHints
from stratagem.devices.communication import (
    CommunicationImplementation as CommunicationImplementation,
)
from stratagem.devices.communication import CommunicationOptions as CommunicationOptions
from stratagem.estimator import train as train
from stratagem.estimator.premade import feature_column as feature_column
from stratagem.execution import summary as summary
from stratagem.execution.function import function as function
from stratagem.execution.gradient import value_and_grad as value_and_grad
from stratagem.execution.programs.lockstep import explain_recompiles as explain_recompiles
from stratagem.execution.replica_context import ReplicaContext as ReplicaContext
from stratagem.execution.replica_context import all_gather as all_gather
from stratagem.execution.replica_context import get_replica_context as get_replica_context
from stratagem.input.distributed import DistributedDataset as DistributedDataset
from stratagem.input.iterator import DistributedIterator as DistributedIterator
from stratagem.keras import nn as nn
from stratagem.keras.callbacks.backup_and_restore import BackupAndRestore as BackupAndRestore
from stratagem.keras.callbacks.sidecar_evaluator import SidecarEvaluator as SidecarEvaluator
from stratagem.keras.callbacks.sidecar_evaluator import (
    SidecarEvaluatorModelExport as SidecarEvaluatorModelExport,
)
from stratagem.keras.callbacks.tensorboard import TensorBoard as TensorBoard
from stratagem.keras.callbacks.tensorboard import profile as profile
from stratagem.keras.numerics.losses import compute_average_loss as compute_average_loss
from stratagem.keras.numerics.losses import scale_regularization_loss as scale_regularization_loss
from stratagem.keras.numerics.optimizer import apply_gradients as apply_gradients
from stratagem.keras.numerics.rematerialization import remat as remat
from stratagem.keras.numerics.scanned_layers import scan_layers as scan_layers
from stratagem.keras.training.datasets import DatasetCreator as DatasetCreator
from stratagem.keras.training.generate_stream import generate_stream as generate_stream
from stratagem.keras.training.model import compile as compile
from stratagem.keras.variables.creation import Variable as Variable
from stratagem.launch import remote as remote
from stratagem.launch.options import ElasticConfig as ElasticConfig
from stratagem.launch.remote.remote_cluster import connect_to_cluster as connect_to_cluster
from stratagem.launch.remote.server import Server as Server
from stratagem.launch.remote.server import run_standard_server as _run_standard_server
from stratagem.launch.remote.server import run_standard_server as run_standard_server
from stratagem.observe import goodput as goodput
from stratagem.observe import profiling as profiling
from stratagem.options import AutoShardPolicy as AutoShardPolicy
from stratagem.options import InputContext as InputContext
from stratagem.options import InputOptions as InputOptions
from stratagem.options import InputReplicationMode as InputReplicationMode
from stratagem.options import ReduceOp as ReduceOp
from stratagem.options import RunOptions as RunOptions
from stratagem.options import ValueContext as ValueContext
from stratagem.options import VariableAggregation as VariableAggregation
from stratagem.options import VariableSynchronization as VariableSynchronization
from stratagem.parameter_server import coordination as _coordination
from stratagem.parameter_server import embedding as embedding
from stratagem.parameter_server import partitioners as partitioners
from stratagem.parameter_server.strategy import HybridStrategy as HybridStrategy
from stratagem.parameter_server.strategy import (
    ParameterServerStrategy as ParameterServerStrategy,
)
from stratagem.planning.planner import plan as plan
from stratagem.strategies import collectives as collectives
from stratagem.strategies import experimental as experimental
from stratagem.strategies import placement as placement
from stratagem.strategies import tpu_names as _tpu_names
from stratagem.strategies.cross_device_ops import CompressedAllReduce as CompressedAllReduce
from stratagem.strategies.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from stratagem.strategies.cross_device_ops import (
    HierarchicalCopyAllReduce as HierarchicalCopyAllReduce,
)
from stratagem.strategies.cross_device_ops import NcclAllReduce as NcclAllReduce
from stratagem.strategies.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from stratagem.strategies.cross_device_ops import RingAllReduce as RingAllReduce
from stratagem.strategies.elastic import ElasticStrategy as ElasticStrategy
from stratagem.strategies.extended import StrategyExtended as StrategyExtended
from stratagem.strategies.local_update import LocalUpdateStrategy as LocalUpdateStrategy
from stratagem.strategies.mirrored import CentralStorageStrategy as CentralStorageStrategy
from stratagem.strategies.mirrored import (
    CollectiveAllReduceStrategy as CollectiveAllReduceStrategy,
)
from stratagem.strategies.mirrored import MirroredStrategy as MirroredStrategy
from stratagem.strategies.mirrored import (
    MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy,
)
from stratagem.strategies.mirrored import OneDeviceStrategy as OneDeviceStrategy
from stratagem.strategies.strategy import Strategy as Strategy
from stratagem.strategies.tpu import TPUStrategy as TPUStrategy
from stratagem.variables.distributed import DistributedValues as DistributedValues
from stratagem.variables.distributed import IndexedSlices as IndexedSlices
from stratagem.variables.distributed import Mirrored as Mirrored
from stratagem.variables.distributed import PerReplica as PerReplica
from stratagem.variables.distributed import regroup as regroup
from stratagem.variables.distributed import select_replica as select_replica
from stratagem.variables.sharded_variable import ShardedVariable as ShardedVariable

__version__: str
cluster_resolver = _resolvers
coordinator = _coordination
run_standard_tensorflow_server = _run_standard_server
tpu = _tpu_names

def public_names(file: str = ...) -> dict[str, tuple[str, str]]: ...
def listed_names(package: str, file: str) -> list[str]: ...
def load_name(package: str, file: str, name: str) -> object: ...

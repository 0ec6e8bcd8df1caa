"""Distribution strategies: one file each, which chooses the four parts and checks arguments."""

from stratagem.strategies.central_storage import CentralStorageStrategy
from stratagem.strategies.compile_only import CompileOnlyStrategy
from stratagem.strategies.coordinator_options import CoordinatorOptions
from stratagem.strategies.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from stratagem.strategies.default import DefaultStrategy
from stratagem.strategies.extended import StrategyExtended
from stratagem.strategies.hybrid import HybridStrategy
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.multi_worker_mirrored import (
    CollectiveAllReduceStrategy,
    MultiWorkerMirroredStrategy,
)
from stratagem.strategies.one_device import OneDeviceStrategy
from stratagem.strategies.parameter_server import ParameterServerStrategy
from stratagem.strategies.process_parts import coordinator_parts, independent_parts, worker_parts
from stratagem.strategies.remote_state_strategy import RemoteStateStrategy
from stratagem.strategies.served_cluster import Cluster, ClusterPlan, set_cluster_maker
from stratagem.strategies.served_values import (
    Gradient,
    OptimizerScalar,
    RowGradient,
    Scalar,
    Stored,
    Unplaced,
)
from stratagem.strategies.strategy import Strategy
from stratagem.strategies.tpu import TPUStrategy
from stratagem.strategies.tpu_system import initialize_tpu_system, shutdown_tpu_system
from stratagem.strategies.variable_client import VariableClient, VariableOnWorkerError

__all__ = [
    "CentralStorageStrategy",
    "Cluster",
    "ClusterPlan",
    "CollectiveAllReduceStrategy",
    "CompileOnlyStrategy",
    "CoordinatorOptions",
    "CrossDeviceOps",
    "DefaultStrategy",
    "Gradient",
    "HierarchicalCopyAllReduce",
    "HybridStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "OptimizerScalar",
    "ParameterServerStrategy",
    "ReductionToOneDevice",
    "RemoteStateStrategy",
    "RingAllReduce",
    "RowGradient",
    "Scalar",
    "Stored",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Unplaced",
    "VariableClient",
    "VariableOnWorkerError",
    "coordinator_parts",
    "independent_parts",
    "initialize_tpu_system",
    "set_cluster_maker",
    "shutdown_tpu_system",
    "worker_parts",
]

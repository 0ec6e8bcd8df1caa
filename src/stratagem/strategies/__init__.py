"""The strategies: each names its parts and checks its arguments."""

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
from stratagem.strategies.served_cluster import Cluster, ClusterPlan, set_cluster_maker
from stratagem.strategies.served_strategy import ServedStrategy
from stratagem.strategies.served_values import (
    Gradient,
    OptimizerScalar,
    RowGradient,
    Scalar,
    Stored,
    Unplaced,
)
from stratagem.strategies.serving import Serving, VariableOnWorkerError
from stratagem.strategies.strategy import Strategy
from stratagem.strategies.tpu import TPUStrategy
from stratagem.strategies.tpu_system import initialize_tpu_system, shutdown_tpu_system

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
    "RingAllReduce",
    "RowGradient",
    "Scalar",
    "ServedStrategy",
    "Serving",
    "Stored",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Unplaced",
    "VariableOnWorkerError",
    "initialize_tpu_system",
    "set_cluster_maker",
    "shutdown_tpu_system",
]

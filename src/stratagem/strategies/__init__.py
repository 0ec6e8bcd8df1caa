"""The strategies: each names its parts and checks its arguments."""

from stratagem.strategies.cross_device_ops import (
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    ReductionToOneDevice,
    RingAllReduce,
)
from stratagem.strategies.default import DefaultStrategy
from stratagem.strategies.extended import StrategyExtended
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.multi_worker_mirrored import (
    CollectiveAllReduceStrategy,
    MultiWorkerMirroredStrategy,
)
from stratagem.strategies.one_device import OneDeviceStrategy
from stratagem.strategies.strategy import Strategy

__all__ = [
    "CollectiveAllReduceStrategy",
    "CrossDeviceOps",
    "DefaultStrategy",
    "HierarchicalCopyAllReduce",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReductionToOneDevice",
    "RingAllReduce",
    "Strategy",
    "StrategyExtended",
]

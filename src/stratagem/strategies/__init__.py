"""The strategies: each names its parts and checks its arguments."""

from stratagem.strategies.default import DefaultStrategy
from stratagem.strategies.extended import StrategyExtended
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.multi_worker_mirrored import (
    CollectiveAllReduceStrategy,
    MultiWorkerMirroredStrategy,
)
from stratagem.strategies.one_device import OneDeviceStrategy
from stratagem.strategies.strategy import Strategy, ValueContext

__all__ = [
    "CollectiveAllReduceStrategy",
    "DefaultStrategy",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
]

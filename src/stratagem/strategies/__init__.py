"""The strategies: each names its parts and checks its arguments."""

from stratagem.strategies.default import DefaultStrategy
from stratagem.strategies.extended import StrategyExtended
from stratagem.strategies.mirrored import MirroredStrategy
from stratagem.strategies.one_device import OneDeviceStrategy
from stratagem.strategies.strategy import Strategy, ValueContext

__all__ = [
    "DefaultStrategy",
    "MirroredStrategy",
    "OneDeviceStrategy",
    "Strategy",
    "StrategyExtended",
    "ValueContext",
]

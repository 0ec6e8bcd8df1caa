"""The default strategy: one replica, plain variables."""

from __future__ import annotations

from typing import final

from stratagem import contexts as stack
from stratagem.devices.mesh import Topology
from stratagem.strategies.base.strategy import Strategy


@final
class DefaultStrategy(Strategy):
    """One replica on JAX's default device; variables are ordinary Keras variables.

    `sg.get_strategy()` returns it outside every scope, so that code written for a strategy runs
    without one.

    Source: TF 2.21 distribute_lib.py, _DefaultDistributionStrategy.
    """

    def __init__(self) -> None:
        super().__init__(Topology(None))


stack.set_default(DefaultStrategy)

"""Callback that ends rounds of local updates with each epoch of `fit`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras

from stratagem.parameter_server.coordinator.cluster_coordinator import (
    ClusterCoordinator,
    end_rounds,
)

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


class EpochRounds(keras.callbacks.Callback):
    """Synchronizes workers before validation and at the end of an epoch.

    Validation, checkpoints and other callbacks then find a global model with all steps.
    """

    runs_first = True

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self._strategy: Any = strategy

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Synchronizes before validation."""
        del logs
        self._synchronize()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Synchronizes at the end of an epoch."""
        del epoch, logs
        self._synchronize()

    def _synchronize(self) -> None:
        executor = self._strategy.executor
        if executor.schedules:
            end_rounds(ClusterCoordinator(self._strategy))
        else:
            worker, _ = executor.worker
            self._strategy.placement.remote.local.end_round(sends_state=worker == 0)

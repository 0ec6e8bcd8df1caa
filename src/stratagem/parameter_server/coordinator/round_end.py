"""End of a round of local updates on all workers, before the global model is used."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stratagem.contexts import get_strategy

if TYPE_CHECKING:
    from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator


def end_rounds(coordinator: ClusterCoordinator) -> None:
    """Makes all workers send their changes since the last synchronization, and waits for them.

    The first worker also sends the state of its optimizers. Does nothing without local updates.
    """
    local = coordinator.strategy.placement.remote.local
    if local is None:
        return
    local.counter.restart()
    for place, worker in enumerate(coordinator.present_workers):
        coordinator.schedule(_end_round, kwargs={"sends_state": place == 0}, worker=worker)
    coordinator.strategy.executor.settle()


def _end_round(*, sends_state: bool) -> None:
    strategy: Any = get_strategy()
    strategy.placement.remote.local.end_round(sends_state=sends_state)

"""Executor of the coordinator process, whose `ClusterCoordinator` schedules steps on workers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, cast

from stratagem.execution.programs.lockstep import Lockstep
from stratagem.messages import explain
from stratagem.parameter_server.coordinator.packing import Packing

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


_POLL_S, _SETTLE_POLL_S = 0.05, 60.0


class Scheduling(Lockstep):
    """Executor of the coordinator process.

    `coordinator` is the strategy's `ClusterCoordinator`, None until it is created. `packing`
    pickles functions and values for workers.
    """

    schedules = True

    def __init__(self, strategy: Strategy, packing: Packing) -> None:
        super().__init__(strategy)
        self.packing = packing
        self.coordinator: Any = None

    def run(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Runs a function in the coordinator process, with a warning."""
        warnings.warn(
            explain(
                "strategy.run was called in the coordinator, so the function runs there.",
                expected="strategy.run in a scheduled function, which runs on a worker.",
                fix="call it in a function passed to ClusterCoordinator.schedule.",
                code="SG611",
            ),
            RuntimeWarning,
            stacklevel=5,  # the caller of `Strategy.run`, which has two decorators
        )
        return super().run(fn, args, kwargs)

    def settle(self) -> None:
        """Waits until all scheduled functions have finished; raises the error of a failed one."""
        if self.coordinator is None:
            return
        variables = self._strategy.placement.remote.variables
        if variables.mode.num_needed > 0:
            # The last gradients may be too few for an update, so their workers would block forever.
            while not self.coordinator.wait(_POLL_S):
                if self.coordinator.num_unfinished < variables.mode.num_needed:
                    variables.client.flush()
        while not self.coordinator.wait(_SETTLE_POLL_S):
            pass

    @contextlib.contextmanager
    def quiesced(self) -> Generator[None]:
        """Keeps workers from updating variables in a `with` block.

        Functions that run finish before. Synchronous ones wait for each other, so all that are
        scheduled finish.
        """
        if self.coordinator is None:
            yield
            return
        if self._strategy.placement.remote.is_synchronous:
            self.settle()
        with self.coordinator.held():
            yield

    def close(self) -> None:
        """Stops the workers."""
        if self.coordinator is not None:
            self.coordinator.close()


def scheduling_of(strategy: Strategy) -> Scheduling:
    """Returns the executor of a coordinator's strategy."""
    return cast("Scheduling", strategy.executor)

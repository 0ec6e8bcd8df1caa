"""A strategy of some tasks of a cluster, which the program of all of them may make."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any

from stratagem.messages import explain
from stratagem.strategies.strategy import Strategy
from stratagem.topology import Topology, local_devices

__all__ = ["OfSomeTasks"]


class OfSomeTasks(Strategy):
    """A strategy that starts nothing in a task that takes no part in the training.

    `absent_task` is type and index of such a task; None where this process takes part.
    """

    absent_task: tuple[str | None, int | None] | None = None
    coordinator: Any

    def begin_absent(self, task: tuple[str | None, int | None]) -> None:
        """Takes no part.

        Args:
            task: type and index of this process.
        """
        Strategy.__init__(self, Topology(local_devices()[:1]))
        self.absent_task = task
        self.coordinator = None

    @contextlib.contextmanager
    def scope(self) -> Generator[Strategy]:
        """Makes this strategy current, as `Strategy.scope` says.

        Yields:
            The strategy.

        Raises:
            RuntimeError: in a task that does not train.
        """
        self.require_present()
        with super().scope():
            yield self

    def require_present(self) -> None:
        """Raises in a task that takes no part.

        Raises:
            RuntimeError: that is so.
        """
        if self.absent_task is None:
            return
        task_type, index = self.absent_task
        raise RuntimeError(
            explain(
                f"A {type(self).__name__} was used in {task_type} {index}, which does not train.",
                expected="the tasks that train, and sg.estimator.train_and_evaluate, which knows "
                "what to do in each task.",
                fix="call sg.run_standard_server().join() in tasks that serve; in the evaluator "
                "build the model without this strategy.",
            )
        )

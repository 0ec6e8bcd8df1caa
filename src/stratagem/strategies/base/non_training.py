"""Executor of tasks that do not train, if one program runs as every task of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from stratagem.execution.programs.lockstep import Lockstep
from stratagem.messages import explain

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


class NonTraining(Lockstep):
    """Runs nothing: the strategy's scope and `run` raise errors in this task.

    `task` is the type and index of this process.
    """

    def __init__(self, strategy: Strategy, task: tuple[str | None, int | None]) -> None:
        super().__init__(strategy)
        self.task = task

    def check_scope(self) -> NoReturn:
        """Raises a RuntimeError."""
        task_type, index = self.task
        kind = type(self._strategy).__name__
        raise RuntimeError(
            explain(
                f"A {kind} was used in {task_type} {index}, which does not train.",
                expected="a task that trains, or sg.estimator.train_and_evaluate, which runs the "
                "right part of the program in each task.",
                fix="call sg.run_standard_server().join() in tasks that serve; in the evaluator, "
                "build the model without this strategy.",
                code="SG511",
            )
        )

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> NoReturn:
        """Raises a RuntimeError."""
        self.check_scope()

    def run_steps(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises a RuntimeError."""
        self.check_scope()

"""`Executor` interface: the part of a strategy that traces, compiles and runs replica functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from stratagem.input.iterator import DistributedIterator
from stratagem.options import ReduceOp

if TYPE_CHECKING:
    from stratagem.execution.tracing.functionalize import Trace


class Executor(Protocol):
    """Runs the replica functions of one strategy.

    A strategy's constructor takes a factory, such as the class `Lockstep`, and calls it with the
    strategy. To write an executor, inherit from `Lockstep`.
    """

    steps_per_call: int | None  # default number of steps of `run_steps` and of `fit`
    schedules: bool  # True if this process only schedules steps on workers
    has_values: bool  # False if variables only have shapes because nothing ever runs
    worker: tuple[int, int]  # index and number of workers that run separate programs

    def check_scope(self) -> None:
        """Raises RuntimeError if this process may not enter the strategy's scope."""
        ...

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Calls a replica function once per replica, in the strategy's scope.

        Each replica gets its component of every `PerReplica` argument. Leaves of the result are
        `PerReplica`; with one replica they are plain values.
        """
        ...

    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: DistributedIterator,
        num_steps: int,
        *,
        reduce_op: ReduceOp | None,
        carry: object,
    ) -> Any:
        """Calls a replica function on up to `num_steps` batches of an iterator.

        Returns the results with steps on axis 0; given a carry (a pytree passed from step to step),
        the pair (carry, results). `reduce_op` combines the results of replicas in each step; None
        leaves them separate. Raises StopIteration if the data ends before the first step.
        """
        ...

    def settle(self) -> None:
        """Waits until all scheduled work has ended; raises the error of failed work."""
        ...

    def close(self) -> None:
        """Shuts down anything that the executor started, such as workers."""
        ...

    def evaluate(self, trace: Trace, name: str, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs a trace that writes no variables and returns its results for all replicas.

        `split` arrays have a replica axis; `shared` arrays go to all replicas. `name` is for
        messages.
        """
        ...

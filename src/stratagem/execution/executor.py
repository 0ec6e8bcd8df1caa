"""Executor: the part of a strategy that traces, compiles and runs its replica functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from stratagem.input.iterator import DistributedIterator
from stratagem.options import ReduceOp

if TYPE_CHECKING:
    from stratagem.execution.tracing.trace import Trace

__all__ = ["Executor"]


class Executor(Protocol):
    """Runs the replica functions of one strategy.

    A strategy's constructor takes a function that makes its executor, such as the class `Lockstep`,
    and calls it with the strategy. To write an executor, inherit from `Lockstep`.
    """

    steps_per_call: int | None  # default number of steps of `run_steps` and of `fit`
    schedules: bool  # True if this process only schedules steps on workers
    has_values: bool  # False if variables have shapes only, because nothing ever runs
    worker: tuple[int, int]  # index and number of workers that run programs of their own

    def check_scope(self) -> None:
        """Checks that this process may enter the strategy's scope.

        Raises:
            RuntimeError: it may not.
        """
        ...

    def run(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Calls a replica function once per replica, in the strategy's scope.

        Args:
            fn: the replica function.
            args: positional arguments; each replica gets its component of a `PerReplica`.
            kwargs: keyword arguments, likewise.

        Returns:
            The result, with `PerReplica` leaves; plain with one replica.
        """
        ...

    def run_steps(
        self,
        fn: Callable[..., Any],
        iterator: DistributedIterator,
        num_steps: int,
        *,
        reduce_op: ReduceOp | None,
        carry: Any,
    ) -> Any:
        """Calls a replica function on the next batches of an iterator.

        Args:
            fn: the replica function of one batch.
            iterator: over a dataset of the same strategy.
            num_steps: at most this many batches.
            reduce_op: combines the results of replicas in each step; None keeps them apart.
            carry: pytree passed from step to step; None for none.

        Returns:
            The results, with the steps on axis 0; with a carry, the pair (carry, results).

        Raises:
            StopIteration: the data ended before the first step.
        """
        ...

    def settle(self) -> None:
        """Waits until all scheduled work has ended; raises the error of work that failed."""
        ...

    def close(self) -> None:
        """Ends what the executor has started, such as workers."""
        ...

    def evaluate(self, trace: Trace, name: str, split: list[Any], shared: list[Any]) -> list[Any]:
        """Runs a trace that writes no variable, and returns its results for all replicas.

        Args:
            trace: of a replica function.
            name: of the function, for messages.
            split: arrays with a replica axis, as of `Arguments`.
            shared: arrays that all replicas get.
        """
        ...

"""Members of an elastic strategy as its user sees them, and how others join."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.group.elastic.group import ElasticGroup
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.elastic_admission import ElasticAdmission


class ElasticMembership(Strategy):
    """A strategy with an elastic group; without one, this process is its only member."""

    _resolver: ClusterResolver
    _group: ElasticGroup | None = None
    _admission: ElasticAdmission | None = None

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster."""
        return self._resolver

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the processes that train, in replica order.

        Example:
            >>> sg.ElasticStrategy().members
            (0,)

        Source: specific to Stratagem.
        """
        return (0,) if self._group is None else self._group.view.members

    @property
    def participants(self) -> tuple[int, ...]:
        """Ids of the processes whose values the last step has combined, in replica order.

        A process that is lost at the end of a step may have taken part in it. With backup workers,
        this process may be no participant itself.

        Example:
            >>> sg.ElasticStrategy().participants
            (0,)

        Source: specific to Stratagem.
        """
        return (0,) if self._group is None else self._group.participants

    def admit(
        self,
        fn: Callable[..., Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Admits processes that were started again, in a custom loop; `fit` does it by itself.

        Call it on every process before each step, outside of `run`. In a process that joins, the
        first call waits until the others admit it. Then all variables have the values of the
        others, so a loop that counts its steps in a variable continues with their step.

        Args:
            fn: the function of the next `run`; a process that joins compiles it before the others
                wait for it. None compiles nothing.
            args: arguments of that `run`, which may have other values.
            kwargs: its keyword arguments.

        Raises:
            UnavailableError: all others ended before this process could join.
            ValueError: this process has other variables than the others.

        Example:
            >>> strategy = sg.ElasticStrategy()
            >>> with strategy.scope():
            ...     num_steps = sg.Variable(0)
            >>> while True:
            ...     strategy.admit()
            ...     if int(num_steps) == 3:  # read after `admit`
            ...         break
            ...     _ = strategy.run(lambda: num_steps.assign_add(1))
            >>> int(num_steps)
            3

        Source: specific to Stratagem.
        """
        admission, executor = self._admission, self.executor
        if admission is None:
            return
        if not admission.is_waiting:
            admission.admit()
            return

        def prepare() -> None:
            if fn is not None and isinstance(executor, ElasticLockstep):
                with self.scope():
                    executor.compile_call(fn, args, kwargs or {})

        admission.join_loop(prepare)

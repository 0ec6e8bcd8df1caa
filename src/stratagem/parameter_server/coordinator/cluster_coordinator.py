"""`ClusterCoordinator`: schedules functions on the workers of a parameter-server cluster."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stratagem.config import filters_traceback
from stratagem.errors import check_type, invalid
from stratagem.launch.processes import not_the_coordinator
from stratagem.logs import PublicDir, as_html, new_table
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from stratagem.parameter_server.coordinator.closure_queue import ClosureQueue
from stratagem.parameter_server.coordinator.coordinated_workers import CoordinatedWorkers
from stratagem.parameter_server.coordinator.remote_value import Closure, RemoteValue, map_structure
from stratagem.parameter_server.coordinator.shipping import (
    PerWorkerDataset,
    PerWorkerValues,
    Resource,
    Scheduling,
    Shipments,
)
from stratagem.parameter_server.server.changes import KINDS
from stratagem.resources import Closing
from stratagem.strategies.strategy import Strategy

# Progress bar for scheduled functions.


@contextlib.contextmanager
def drawn_progress(
    counts: Callable[[], Mapping[str, int]], console: Console | None = None
) -> Generator[Callable[[], None]]:
    """Shows a progress bar in a `with` block; yields a function that redraws it.

    `counts` has the keys of `ClosureQueue.counts`. `console` None is stderr; a console that is not
    a terminal shows only the last state.
    """
    done_before = counts()["done"]
    columns = (
        TextColumn("functions"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[running]} running"),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    screen = console or Console(stderr=True)
    with Progress(*columns, console=screen, auto_refresh=False) as progress:
        task = progress.add_task("", total=None, running=0)

        def draw() -> None:
            now = counts()
            done = now["done"] - done_before
            total = done + now["queued"] + now["waiting"] + now["running"]
            progress.update(task, completed=done, total=total, running=now["running"], refresh=True)

        draw()
        try:
            yield draw
        finally:
            draw()


_making = threading.Lock()
_DRAW_EVERY_S = 0.2


class ClusterCoordinator(PublicDir, Closing):
    """Schedules functions on the workers of a `ParameterServerStrategy`. Call in the coordinator.

    Each strategy has one coordinator: a second call returns the same object.

    Args:
        strategy: an `sg.ParameterServerStrategy`.

    Raises:
        ValueError: `strategy` is a strategy of another kind.

    Example:
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     coordinator = sg.coordinator.ClusterCoordinator(strategy)
        ...     results = [coordinator.schedule(pow, args=(2, power)) for power in range(4)]
        ...     coordinator.join()
        ...     [result.fetch() for result in results]
        [1, 2, 4, 8]

    Source: TF 2.21 cluster_coordinator.py, ClusterCoordinator.
    """

    _strategy: RemoteStateStrategy

    def __new__(cls, strategy: Strategy) -> ClusterCoordinator:
        """Returns the strategy's coordinator. The first call creates it and starts the workers."""
        if not isinstance(strategy, RemoteStateStrategy):
            raise invalid(
                f"ClusterCoordinator received {strategy!r}.",
                expected="an sg.ParameterServerStrategy.",
                fix="create one, and create the model in its scope.",
            )
        with _making:
            executor = strategy.executor
            executor.check_scope()
            if not isinstance(executor, Scheduling):
                raise not_the_coordinator()
            if executor.coordinator is None:
                made = object.__new__(cls)
                made._begin(strategy)
                executor.coordinator = made
            return executor.coordinator

    def __init__(self, strategy: Strategy) -> None:
        assert strategy is self._strategy

    def __repr__(self) -> str:
        name, present = type(self).__name__, len(self.present_workers)
        return f"{name}({present} of {self.num_workers} workers, {self._strategy})"

    def _repr_html_(self) -> str:
        table = new_table(None, ["", ""])
        table.add_row("workers", str(self.num_workers))
        table.add_row("present workers", ", ".join(map(str, self.present_workers)) or "none")
        table.add_row("lost updates", str(self.num_lost_updates))
        table.add_row("strategy", str(self._strategy))
        return as_html([type(self).__name__, table])

    def _begin(self, strategy: RemoteStateStrategy) -> None:
        self._strategy = strategy
        self._queue = ClosureQueue()
        self._shipments = Shipments(strategy)
        self._workers = CoordinatedWorkers(strategy, self._queue)
        self.workers = self._workers.processes
        self.stalls = self._workers.stalls

    @property
    def strategy(self) -> RemoteStateStrategy:
        """The strategy of this coordinator."""
        return self._strategy

    @property
    def num_lost_updates(self) -> int:
        """Number of updates of all kinds lost in server restarts, as seen by workers."""
        return self._workers.lost_updates.total()

    def updates(self) -> dict[str, dict[str, int]]:
        """Returns the numbers of updates by kind. Call in cross-replica context.

        The kinds are "assign", "assign_add" (also subtractions), "scatter", "scatter_add" (rows),
        and "push" (gradients of a step). An update of several servers counts once on each.

        Returns:
            For each kind, the number of updates that were "applied"; "resent": copies of a request
            that were not applied again; "repeated": updates of functions that ran again, which
            were not applied again; and "lost": applied, but gone with a server that restarted.
        """
        servers = self._strategy.placement.remote.variables.client.describe().values()
        lost = self._workers.lost_updates
        return {
            kind: {
                **{
                    outcome: sum(server["updates"][outcome].get(kind, 0) for server in servers)
                    for outcome in ("applied", "resent", "repeated")
                },
                "lost": lost[kind],
            }
            for kind in KINDS
        }

    def staleness(self) -> dict[int, int]:
        """Returns how stale the applied gradients were. Call in cross-replica context.

        The staleness of a gradient is the number of updates that its server made between the read
        of the values and the arrival of the gradient.

        Returns:
            The number of used pushes for each staleness, summed over all workers and servers.
        """
        return self._strategy.placement.remote.variables.client.staleness()

    @property
    def num_workers(self) -> int:
        """Number of workers."""
        return self._workers.count

    @property
    def present_workers(self) -> list[int]:
        """Indices of all workers that are not permanently lost."""
        return self._workers.present

    @filters_traceback
    def schedule(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] | list[Any] | None = None,
        kwargs: dict[str, Any] | None = None,
        *,
        worker: int | None = None,
    ) -> RemoteValue:
        """Schedules a function on a worker and returns immediately. Call in cross-replica context.

        The function runs at least once: if its worker is lost, it runs again on another one. Its
        metric updates count once, and so do its variable updates if it makes them in the same
        order each time. Each worker receives the function once, with the models,
        optimizers and metrics that it refers to. Pass changing values as arguments. Functions that
        took less than 15 ms so far travel in groups of at most 30 ms, whose results arrive
        together.

        Args:
            fn: the function. The worker calls it as is; `strategy.run` in it compiles.
            args: tuple or list of positional arguments. For `PerWorkerValues` the function receives
                the value of its worker; for a `RemoteValue` its value, once it is ready.
            kwargs: keyword arguments, treated in the same way.
            worker: index of the only worker that may run it; None for any worker.

        Returns:
            A `RemoteValue` for the result.

        Raises:
            TypeError: `fn` is not callable, or something in it or its arguments cannot be sent to
                another process.
            ValueError: `worker` is out of range, `args` is not a tuple or list, or an argument
                belongs to another coordinator. Any other error is that of an earlier function,
                raised once.

        Source: TF 2.21 cluster_coordinator.py, ClusterCoordinator.schedule.
        """
        self._check(fn, args, worker)
        args, kwargs = tuple(args or ()), dict(kwargs or {})
        call = self._shipments.call(fn, args, kwargs)
        name = getattr(fn, "__name__", type(fn).__name__)
        closure = Closure(call, name=name, inputs=call.inputs, worker=worker)
        closure.result.owner = self._shipments
        self._queue.put(closure)
        return closure.result

    def _check(self, fn: object, args: object, worker: object) -> None:
        how = "pass the function as `fn` and its arguments as `args`."
        check_type("fn", fn, callable, "a callable", how, owner="schedule")
        if args is not None and not isinstance(args, tuple | list):
            raise invalid(
                f"schedule received args of type {type(args).__name__}.",
                expected="a tuple or list of positional arguments.",
                fix="write args=(value,) with a comma.",
            )
        if worker is not None and worker not in range(self.num_workers):
            raise invalid(
                f"schedule received worker={worker!r}.",
                expected=f"an index from 0 to {self.num_workers - 1}, or None for any worker.",
                fix="omit `worker`.",
            )

    @filters_traceback
    def join(self, *, progress: bool = False) -> None:
        """Waits until all scheduled functions have finished. Call in cross-replica context.

        Args:
            progress: True shows a progress bar.

        Raises:
            BaseException: the first error of a function, raised once; functions that had not
                started by then are cancelled.

        Source: TF 2.21 cluster_coordinator.py, ClusterCoordinator.join.
        """
        if progress:
            with drawn_progress(lambda: self._queue.counts) as draw:
                while not self._queue.wait(_DRAW_EVERY_S):
                    draw()
        self._queue.wait()

    def wait(self, timeout_s: float) -> bool:
        """Waits until all scheduled functions have finished, for a limited time.

        Args:
            timeout_s: time limit in seconds.

        Returns:
            True if all functions have finished.

        Raises:
            BaseException: as in `join`.
        """
        return self._queue.wait(timeout_s)

    @property
    def num_unfinished(self) -> int:
        """Number of scheduled functions that have not finished."""
        counts = self._queue.counts
        return counts["queued"] + counts["waiting"] + counts["running"]

    @filters_traceback
    def done(self) -> bool:
        """Returns True if all scheduled functions have finished. Call in cross-replica context.

        Returns:
            True if nothing is queued or running. It does not wait: after an error it returns False
            until no function is running.

        Raises:
            BaseException: as in `join`.

        Source: TF 2.21 cluster_coordinator.py, ClusterCoordinator.done.
        """
        return self._queue.is_done()

    @filters_traceback
    def fetch(self, val: object) -> Any:
        """Waits for results and returns them as NumPy arrays. Call in cross-replica context.

        Args:
            val: pytree with leaves of type `RemoteValue`, or `PerWorkerValues` of them.

        Returns:
            The same pytree with values instead; a list of values for each `PerWorkerValues`.

        Raises:
            CancelledError: a function was cancelled. Any other error is the one that a function
                raised.

        Source: TF 2.21 cluster_coordinator.py, ClusterCoordinator.fetch.
        """

        def fetched(leaf: object) -> Any:
            if isinstance(leaf, PerWorkerValues):
                return [fetched(one) for one in leaf.values]
            return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf

        return map_structure(
            fetched, val, lambda leaf: isinstance(leaf, PerWorkerValues | RemoteValue)
        )

    def create_per_worker_dataset(
        self, dataset_fn: Callable[[], Iterable[Any]] | Iterable[Any]
    ) -> PerWorkerDataset:
        """Creates a dataset on each worker. Call in cross-replica context.

        Args:
            dataset_fn: function that returns an iterable, called on each worker and again after a
                restart; or a dataset, which is sent to the workers.

        Returns:
            The dataset. Pass `iter(dataset)` to scheduled functions: each receives the iterator of
            its worker.

        Raises:
            TypeError: something in `dataset_fn` cannot be sent to another process.

        Source: TF 2.21 cluster_coordinator.py, ClusterCoordinator.create_per_worker_dataset.
        """
        return PerWorkerDataset(
            lambda: self._made_on_workers(functools.partial(_iterator, dataset_fn))
        )

    def create_per_worker(self, make: Callable[[], Any]) -> PerWorkerValues:
        """Creates an object on each worker, for use by scheduled functions.

        Args:
            make: called on each worker before the first function that needs the object, and again
                after a restart of the worker.

        Returns:
            A reference to the objects: as an argument, a function receives the object of its
            worker.

        Raises:
            TypeError: something in `make` cannot be sent to another process.
        """
        return PerWorkerValues(self._made_on_workers(make))

    def _made_on_workers(self, make: Callable[[], Any]) -> list[Resource]:
        return [self._shipments.resource(make)] * self.num_workers

    def close(self) -> None:
        """Stops the workers, and cancels functions that have not finished."""
        self._queue.close()
        self._workers.close()


def _iterator(dataset_or_fn: Any) -> Any:
    """Returns a new iterator of a dataset, or of what a function returns."""
    return iter(dataset_or_fn if hasattr(dataset_or_fn, "__iter__") else dataset_or_fn())

"""Values and datasets with one instance per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from stratagem.messages import explain
from stratagem.parameter_server.coordinator.packing import Resource
from stratagem.parameter_server.coordinator.remote_value import RemoteValue


class PerWorkerValues:
    """One value per worker: a scheduled function gets the value of the worker that runs it.

    Args:
        values: one `RemoteValue` per worker, in the order of the workers.

    Raises:
        ValueError: an element is not a `RemoteValue`.

    Example:
        >>> results = [sg.coordinator.RemoteValue() for _ in range(2)]  # schedule(fn, worker=index)
        >>> sg.coordinator.PerWorkerValues(results)
        PerWorkerValues(2 workers)

    Source: TF 2.21 values.py, PerWorkerValues.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue | Resource):
                raise ValueError(
                    explain(
                        f"PerWorkerValues received an element of type {type(value).__name__}.",
                        expected="one RemoteValue per worker.",
                        fix="schedule a function on each worker and pass the list of results.",
                    )
                )
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({len(self.values)} workers)"


class PerWorkerIterator(PerWorkerValues):
    """One iterator per worker, created by `iter(per_worker_dataset)`.

    Only scheduled functions can call `next` on it.

    Raises:
        NotImplementedError: `next` is called in the coordinator.

    Source: TF 2.21 cluster_coordinator.py, PerWorkerDistributedIterator.
    """

    def __iter__(self) -> PerWorkerIterator:
        """Returns itself."""
        return self

    def __next__(self) -> NoReturn:
        """Raises NotImplementedError: the batches are on the workers."""
        raise NotImplementedError(
            explain(
                "next() was called in the coordinator on the iterator of a per-worker dataset.",
                expected="next() in a scheduled function, which runs on a worker.",
                fix="pass the iterator to a scheduled function: "
                "coordinator.schedule(step, args=(iterator,)).",
                code="SG611",
            )
        )


class PerWorkerDataset:
    """A dataset with an independent copy on each worker. Created by `create_per_worker_dataset`.

    Args:
        make_iterators: returns references to new iterators, one per worker.

    Example:
        >>> dataset = sg.coordinator.PerWorkerDataset(
        ...     lambda: [sg.coordinator.RemoteValue() for _ in range(2)])
        >>> iter(dataset)  # pass it to a scheduled function, which calls next
        PerWorkerValues(2 workers)

    Source: TF 2.21 cluster_coordinator.py, PerWorkerDistributedDataset.
    """

    def __init__(self, make_iterators: Callable[[], Sequence[Resource]]) -> None:
        self._make_iterators = make_iterators

    def __iter__(self) -> PerWorkerIterator:
        """Returns an iterator for each worker, as an argument for scheduled functions."""
        return PerWorkerIterator(self._make_iterators())

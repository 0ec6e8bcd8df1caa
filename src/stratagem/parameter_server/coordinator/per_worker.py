"""Values and datasets with one instance per worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from stratagem.messages import explain
from stratagem.parameter_server.coordinator.packing import Resource
from stratagem.parameter_server.coordinator.remote_value import RemoteValue

__all__ = ["PerWorkerDataset", "PerWorkerIterator", "PerWorkerValues"]


class PerWorkerValues:
    """Values of which each worker gets its own, as an argument of a scheduled function.

    Args:
        values: one a worker, in the order of the workers.

    Raises:
        ValueError: an element that is no `RemoteValue`.

    Source: TF 2.21 values.py, PerWorkerValues.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        for value in values:
            if not isinstance(value, RemoteValue | Resource):
                raise ValueError(
                    explain(
                        f"PerWorkerValues received an element of type {type(value).__name__}.",
                        expected="a RemoteValue for each worker.",
                        fix="schedule a function on each worker and pass what schedule returns.",
                    )
                )
        self.values = tuple(values)

    def __repr__(self) -> str:
        return f"PerWorkerValues({len(self.values)} workers)"


class PerWorkerIterator(PerWorkerValues):
    """Iterators of which each worker has its own. Made by `iter` of a per-worker dataset.

    Raises:
        NotImplementedError: the coordinator asks for the next batch.

    Source: TF 2.21 cluster_coordinator.py, PerWorkerDistributedIterator.
    """

    def __iter__(self) -> PerWorkerIterator:
        """Returns itself."""
        return self

    def __next__(self) -> NoReturn:
        """Raises: the batches are on the workers."""
        raise NotImplementedError(
            explain(
                "The coordinator asked for the next batch of a per-worker dataset.",
                expected="scheduled functions that ask for it, on the workers.",
                fix="pass the iterator to a function that calls next() on it: "
                "coordinator.schedule(step, args=(iterator,)).",
            )
        )


class PerWorkerDataset:
    """A dataset that each worker reads for itself. Made by `create_per_worker_dataset`.

    Args:
        make_iterators: returns what stands for the workers' new iterators.
    """

    def __init__(self, make_iterators: Callable[[], Sequence[Resource]]) -> None:
        self._make_iterators = make_iterators

    def __iter__(self) -> PerWorkerIterator:
        """Returns an iterator for each worker, to be passed to scheduled functions."""
        return PerWorkerIterator(self._make_iterators())

"""Sources of indexable batches: lists, and Keras PyDatasets with their workers."""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NoReturn

import jax
import numpy as np

from stratagem.devices.mesh import is_explicit
from stratagem.errors import check_number, invalid
from stratagem.input.sources.source import INFINITE_CARDINALITY, Reader, Source

# Sources of in-memory arrays and other indexable rows, with batching and shuffling.


class RowSource(Source):
    """Batches of rows selected by index.

    `take` returns the batch of an array of indices or a slice. `shuffle` reorders the rows in each
    epoch by `seed` and epoch. `is_in_memory` is that of the readers. `can_reshape` is True if the
    batches are NumPy arrays.
    """

    is_in_memory = False
    can_reshape = False
    can_seek = True

    @property
    def order_follows_epoch(self) -> bool:
        """True."""
        return True

    def __init__(
        self,
        take: Callable[[Any], Any],
        num_rows: int,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        check_number("sg.input.Dataset", batch_size=batch_size)
        self.take = take
        self.num_rows = num_rows
        self.batch_size = batch_size
        self.drop_remainder = drop_remainder
        self._shuffle = shuffle
        self._seed = seed

    @property
    def cardinality(self) -> int:
        """Number of batches."""
        if self.drop_remainder:
            return self.num_rows // self.batch_size
        return -(-self.num_rows // self.batch_size)

    def order(self, epoch: int) -> np.ndarray[Any, Any] | None:
        """Returns the row indices in the order of an epoch, or None for the natural order."""
        if not self._shuffle:
            return None
        return np.random.default_rng([self._seed, epoch]).permutation(self.num_rows)

    def open(self, epoch: int) -> Reader:
        """Opens an epoch, which determines the order if the source shuffles."""
        return _RowReader(self, self.order(epoch))


class _RowReader(Reader):
    def __init__(self, source: RowSource, order: np.ndarray[Any, Any] | None) -> None:
        self._source = source
        self._order = order
        self.is_in_memory = source.is_in_memory

    def read(self) -> Any:
        if self.num_read >= self._source.cardinality:
            raise StopIteration
        start = self.num_read * self._source.batch_size
        stop = min(start + self._source.batch_size, self._source.num_rows)
        return self._source.take(self._rows(start, stop))

    def read_many(self, count: int, num_parts: int) -> tuple[Any, int] | None:
        size, first = self._source.batch_size, self.num_read
        count = min(count, self._source.num_rows // size - first)
        if count < 1 or size % num_parts or not self._source.can_reshape:
            return None
        rows = self._rows(first * size, (first + count) * size)
        batches = jax.tree.map(
            lambda leaf: leaf.reshape(count, size, *leaf.shape[1:]), self._source.take(rows)
        )
        return batches, count

    def _rows(self, start: int, stop: int) -> Any:
        return slice(start, stop) if self._order is None else self._order[start:stop]

    def restore(self, state: dict[str, Any]) -> None:
        self.num_read = state["num_read"]


def _has_rows(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and not is_explicit(leaf)


class ArraySource(RowSource):
    """A pytree of arrays of equal length, with examples on axis 0."""

    is_in_memory = True

    def __init__(self, arrays: object, **options: Any) -> None:
        arrays = jax.tree.map(lambda leaf: leaf if _has_rows(leaf) else np.asarray(leaf), arrays)
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(arrays)]
        if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise invalid(
                f"A dataset cannot be made from arrays of shapes {shapes}.",
                expected="arrays with the examples on axis 0, all of the same length.",
                fix="make axis 0 of all arrays the same length.",
            )
        self.arrays = arrays
        self.can_reshape = all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(arrays))
        super().__init__(
            lambda rows: jax.tree.map(lambda leaf: leaf[rows], arrays), shapes[0][0], **options
        )


class SequenceSource(RowSource):
    """A list or tuple of batches."""

    def __init__(self, batches: Sequence[Any]) -> None:
        super().__init__(functools.partial(_batch_of, batches), len(batches), batch_size=1)


def _batch_of(batches: Sequence[Any], rows: slice) -> Any:
    return batches[rows.start]


class PyDatasetSource(Source):
    """A `keras.utils.PyDataset`, with its workers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    @property
    def cardinality(self) -> int:
        """Number of batches; infinite if the dataset returns None."""
        count = self._dataset.num_batches
        return INFINITE_CARDINALITY if count is None else int(count)

    def open(self, epoch: int) -> Reader:
        """Notifies the dataset of a new epoch and reads from batch 0."""
        return _PyDatasetReader(self._dataset)


_worker_dataset: Any = None  # The dataset of this worker process.


def _set_worker_dataset(dataset: Any) -> None:
    global _worker_dataset
    _worker_dataset = dataset


def _get_from_worker_dataset(number: int) -> Any:
    return _worker_dataset[number]


class _PyDatasetReader(Reader):
    """Reads batches in order, computed ahead by the workers."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._executor: Executor | None = None
        self._futures: list[Future[Any]] = []
        self._next_number = 0
        dataset.on_epoch_begin()

    def restore(self, state: dict[str, Any]) -> None:
        self._next_number = self.num_read = state["num_read"]

    def read(self) -> Any:
        if self._executor is None and self._dataset.workers > 1:
            self._executor = self._start_workers()
        if self._executor is None:
            number = self._take_number()
            if number is None:
                self._end()
            return self._dataset[number]
        while len(self._futures) < max(self._dataset.max_queue_size, self._dataset.workers):
            number = self._take_number()
            if number is None:
                break
            self._futures.append(self._submit(number))
        if not self._futures:
            self._end()
        return self._futures.pop(0).result()

    def _take_number(self) -> int | None:
        count = self._dataset.num_batches
        if count is not None and self._next_number >= count:
            return None
        self._next_number += 1
        return self._next_number - 1

    def _start_workers(self) -> Executor:
        dataset = self._dataset
        if dataset.use_multiprocessing:
            return ProcessPoolExecutor(
                dataset.workers,
                mp_context=multiprocessing.get_context("spawn"),  # JAX does not support forking.
                initializer=_set_worker_dataset,
                initargs=(dataset,),
            )
        return ThreadPoolExecutor(dataset.workers, thread_name_prefix="stratagem-pydataset")

    def _submit(self, number: int) -> Future[Any]:
        assert self._executor is not None
        if isinstance(self._executor, ProcessPoolExecutor):
            return self._executor.submit(_get_from_worker_dataset, number)
        return self._executor.submit(self._dataset.__getitem__, number)

    def _end(self) -> NoReturn:
        self._dataset.on_epoch_end()
        self.close()
        raise StopIteration

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
        self._futures = []

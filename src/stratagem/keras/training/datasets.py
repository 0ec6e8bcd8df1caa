"""Data of `fit`, `evaluate` and `predict` that is no array on the host.

Distributed datasets, `DatasetCreator`, which makes a dataset in each process, and arrays on an
accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from stratagem.contexts import get_strategy, has_strategy
from stratagem.devices.shards import require_exact_integers
from stratagem.errors import check_type, invalid
from stratagem.execution.programs.elastic import ElasticLockstep
from stratagem.input.batches import DeviceRows, is_on_accelerator
from stratagem.input.dataset import Dataset
from stratagem.input.distributed import DistributedDataset
from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import INFINITE_CARDINALITY
from stratagem.keras.patches import patches
from stratagem.keras.private import (
    ArrayDataAdapter,
    DataAdapter,
    array_batches,
    arrays_of,
    grouped,
)
from stratagem.options import InputContext, InputOptions

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy


class DatasetCreator:
    """Data of `fit`, `evaluate` and `predict`, created by a function in each process that reads it.

    Under a `ParameterServerStrategy` these processes are the workers; otherwise they are the
    processes of the strategy. The dataset is neither sharded nor repeated: the function selects
    its part by its argument. An epoch is one pass over the dataset in each process, or
    `steps_per_epoch` batches.

    Args:
        dataset_fn: takes an `sg.InputContext` and returns a dataset, batched by the per-replica
            batch size.
        input_options: options for the transfer of batches to the devices; None for the defaults.

    Raises:
        TypeError: an argument has another type.

    Example:
        >>> def dataset_fn(context):  # each process reads its own part of the data
        ...     x = np.arange(8.0)[context.input_pipeline_id :: context.num_input_pipelines]
        ...     batch_size = context.get_per_replica_batch_size(4)
        ...     return sg.input.Dataset((x[:, None], x[:, None]), batch_size=batch_size)
        >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     model = keras.Sequential([keras.layers.Dense(1)])
        ...     model.compile("sgd", "mse")
        >>> history = model.fit(sg.DatasetCreator(dataset_fn), epochs=2, verbose=0)
        >>> len(history.history["loss"])
        2

    Source: Keras 2.15 keras/utils/dataset_creator.py, DatasetCreator.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        input_options: InputOptions | None = None,
    ) -> None:
        wanted = "a function of an sg.InputContext that returns a dataset"
        check_type("dataset_fn", dataset_fn, callable, wanted, owner="DatasetCreator")
        wanted = "sg.InputOptions or None"
        check_type(
            "input_options", input_options, InputOptions | None, wanted, owner="DatasetCreator"
        )
        self._dataset_fn = dataset_fn
        self._input_options = input_options

    @property
    def input_options(self) -> InputOptions | None:
        """Options for the transfer of batches to the devices."""
        return self._input_options

    def __call__(self, input_context: InputContext) -> Any:
        """Creates the dataset of one process.

        Args:
            input_context: index of the process and number of processes.

        Returns:
            The dataset that `dataset_fn` returned.

        Raises:
            TypeError: `dataset_fn` did not return a dataset.
            ValueError: it returned arrays, which are not batched.
        """
        made = self._dataset_fn(input_context)
        as_source(made)  # Raises for unsupported data.
        return made


def part_of(
    creator: DatasetCreator, worker: int, num_workers: int, *, are_in_sync: bool
) -> Callable[[InputContext], Any]:
    """Returns the dataset function of one of several workers.

    `are_in_sync` is True if the replicas of all workers run each step together.
    """

    def dataset_fn(own: InputContext) -> Any:
        return creator(
            InputContext(
                num_workers * own.num_input_pipelines,
                worker * own.num_input_pipelines + own.input_pipeline_id,
                (num_workers if are_in_sync else 1) * own.num_replicas_in_sync,
            )
        )

    return dataset_fn


def require_end(
    cardinality: int, name: str, steps: object, kind: str = "DatasetCreator whose dataset"
) -> None:
    """Raises ValueError if an epoch would never end: infinite data and `steps` is None."""
    if steps is None and cardinality == INFINITE_CARDINALITY:
        raise invalid(
            f"{name} received a {kind} is infinite, but no number of steps.",
            expected="a finite dataset, or the number of batches to read.",
            fix="pass steps_per_epoch to fit, validation_steps for validation_data, and steps "
            "to evaluate and predict.",
            code="SG309",
        )


# Adapters, which give Keras the batches.


class UnreadData(DataAdapter):
    """Data adapter without batch sizes, and with one kind of iterator."""

    @property
    def batch_size(self) -> None:
        """None: unknown before a batch is read."""
        return None

    @property
    def has_partial_batch(self) -> None:
        """None: unknown before a batch is read."""
        return None

    @property
    def partial_batch_size(self) -> None:
        """None: unknown before a batch is read."""
        return None

    def batches(self) -> Iterator[Any]:
        """Returns an iterator over the batches of an epoch."""
        raise NotImplementedError

    def get_jax_iterator(self, super_batch: int | None = None) -> Iterator[Any]:
        """Returns the batches; from Keras 3.16 on, in groups of `super_batch` for its scan."""
        return grouped(self.batches(), super_batch)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """Returns the batches."""
        return self.batches()


_BESIDE = ("y", "sample_weight", "class_weight")
_STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}


class DatasetAdapter(UnreadData):
    """Passes the batches of a distributed dataset to Keras. Each iterator reads one epoch."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._num_opened = 0
        self._num_to_pass = 0
        self._unread: Iterator[Any] | None = None

    @property
    def opening(self) -> int:
        """Number of passes over the dataset before the one that the next iterator reads."""
        return self._num_opened - (self._unread is not None)

    @property
    def can_go_to(self) -> bool:
        """True if any pass can be read without reading the earlier ones."""
        return self._dataset.order_follows_epoch

    def go_to(self, opening: int, num_batches: int) -> None:
        """Makes the next iterator read pass `opening` (from 0) and skip `num_batches` batches."""
        if callable(close := getattr(self._unread, "close", None)):
            close()
        self._unread = None
        self._num_opened, self._num_to_pass = opening, num_batches

    @property
    def num_batches(self) -> int | None:
        """Batches per epoch; None if unknown or infinite."""
        count = self._dataset.cardinality
        return count if count >= 0 else None

    @property
    def arrays_of_all(self) -> Any:
        """Arrays that all processes read; None for another source, or data of their own."""
        return self._dataset.arrays_of_all

    def batches(self) -> Iterator[Any]:
        """Returns an iterator over host batches. The dataset is opened at the first `next`.

        Keras creates more iterators than it reads. For an unbuilt model it reads one batch and
        starts over; the next iterator then repeats that batch, so that a generator loses no data.
        """
        num_read, self._num_to_pass = self._num_to_pass, 0
        source = self._unread or self._opened(num_read)
        self._unread = None
        is_plain = not has_strategy()
        has_ended = False
        first: Any = None
        try:
            for batch in source:
                first, num_read = (None if num_read else batch), num_read + 1
                if is_plain:  # Keras puts the batch on the device
                    require_exact_integers(batch.arrays)
                yield batch.whole() if is_plain else batch
            has_ended = True
        finally:
            if num_read == 1 and not has_ended and self.num_batches != 1:
                self._unread = _chained(first, source)
            elif callable(close := getattr(source, "close", None)):
                close()

    def _opened(self, num_to_pass: int) -> Iterator[Any]:
        loader = self._dataset.make_loader(self._num_opened, None)
        self._num_opened += 1
        return loader.host_batches(num_to_pass)


def _chained(first: object, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def is_dataset(value: object) -> bool:
    """Returns True for a dataset that Keras does not support, or for a `DatasetCreator`."""
    return isinstance(value, Dataset | DistributedDataset | DatasetCreator)


def adapted(strategy: Strategy, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns adapters for the datasets among the arguments of `fit`, `evaluate` or `predict`.

    `arguments` are by name. Raises ValueError for the dataset of another strategy, for targets or
    weights passed next to a dataset, and for an infinite dataset without a number of steps.
    """
    adapters: dict[str, Any] = {}
    for key in ("x", "validation_data"):
        value: Any = arguments.get(key)
        if not is_dataset(value):
            continue
        beside = [other for other in _BESIDE if key == "x" and arguments.get(other) is not None]
        if beside:
            raise invalid(
                f"{name} received both a {type(value).__name__} and {' and '.join(beside)}.",
                expected="targets and weights in the batches of the dataset.",
                fix="make the dataset yield (x, y) or (x, y, sample_weight).",
            )
        steps = arguments.get(_STEPS.get(name, "") if key == "x" else "validation_steps")
        if isinstance(value, DatasetCreator) and strategy.executor.schedules:
            adapters[key] = strategy.placement.remote.keras.worker_data(
                strategy, value, name, steps, is_training=name == "fit" and key == "x"
            )
            continue
        dataset = _distributed(strategy, name, value)
        if isinstance(value, DatasetCreator):
            require_end(dataset.cardinality, name, steps)
        else:
            require_end(dataset.cardinality, name, steps, f"{type(value).__name__} that")
        adapters[key] = DatasetAdapter(dataset)
    return adapters


def _distributed(
    strategy: Strategy, name: str, dataset: Dataset | DistributedDataset | DatasetCreator
) -> DistributedDataset:
    if isinstance(dataset, DatasetCreator):
        worker, num_workers = strategy.executor.worker
        are_in_sync = num_workers > 1 and strategy.placement.remote.is_synchronous
        dataset_fn = part_of(dataset, worker, num_workers, are_in_sync=are_in_sync)
        return strategy.distribute_datasets_from_function(dataset_fn, dataset.input_options)
    if isinstance(dataset, Dataset):
        return strategy.distribute_dataset(dataset)
    if dataset.strategy is not strategy:
        raise invalid(
            f"{name} received a dataset of {dataset.strategy}, but the model belongs to "
            f"{strategy}.",
            expected="a dataset distributed by the model's strategy.",
            fix="call model.distribute_strategy.distribute_dataset, or pass the dataset "
            "without distributing it first.",
        )
    return dataset


# Arrays on an accelerator, without a copy on the host.

_MOST_ROWS = int(np.iinfo(np.int32).max)  # Their numbers are int32 on the device.


@patches(ArrayDataAdapter, "get_jax_iterator", why="arrays on an accelerator stay there")
def selecting_on_device(original: Callable[..., Any]) -> Any:
    """Returns the method of Keras's adapter of arrays that iterates over batches.

    Keras copies arrays of JAX to the host. Those on an accelerator are yielded as `DeviceRows`, in
    Keras's order.
    """

    @functools.wraps(original)
    def batches(self: ArrayDataAdapter, **grouping: Any) -> Iterator[Any]:
        arrays = arrays_of(self)
        columns = [array for array in keras.tree.flatten(arrays) if array is not None]
        if not any(map(_can_stay, columns)) or not (has_strategy() and _selects(get_strategy())):
            return original(self, **grouping)
        return array_batches(self, [*map(_rows, columns)])

    return batches


def _can_stay(array: Any) -> bool:
    if not is_on_accelerator(array):
        return False
    return array.is_fully_addressable and array.ndim > 0 and array.shape[0] <= _MOST_ROWS


def _selects(strategy: Strategy) -> bool:
    """Returns True if steps of this strategy select the rows on the devices of this process."""
    topology = strategy.topology
    return not (
        strategy.executor.schedules
        or isinstance(strategy.executor, ElasticLockstep)
        or topology.spans_processes
        or topology.is_abstract
    )


def _rows(array: Any) -> Any:
    """Returns the rows of an array on an accelerator, and any other array itself."""
    if not _can_stay(array):
        return array
    is_other_float = keras.backend.is_float_dtype(array.dtype) and (
        keras.backend.standardize_dtype(array.dtype) != keras.backend.floatx()
    )
    return DeviceRows(array, dtype=keras.backend.floatx() if is_other_float else None)

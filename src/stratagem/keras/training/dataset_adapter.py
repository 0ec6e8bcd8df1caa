"""Adapters that pass distributed datasets to `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stratagem.contexts import has_strategy
from stratagem.devices.exact_integers import require_exact_integers
from stratagem.errors import explain
from stratagem.input.dataset import Dataset
from stratagem.input.distributed import DistributedDataset
from stratagem.keras.training.dataset_creator import DatasetCreator, part_of, require_end
from stratagem.keras.training.remote_keras import UnreadData

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


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
            raise ValueError(
                explain(
                    f"{name} received both a {type(value).__name__} and {' and '.join(beside)}.",
                    expected="targets and weights in the batches of the dataset.",
                    fix="make the dataset yield (x, y) or (x, y, sample_weight).",
                )
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
        raise ValueError(
            explain(
                f"{name} received a dataset of {dataset.strategy}, but the model belongs to "
                f"{strategy}.",
                expected="a dataset distributed by the model's strategy.",
                fix="call model.distribute_strategy.distribute_dataset, or pass the dataset "
                "without distributing it first.",
            )
        )
    return dataset

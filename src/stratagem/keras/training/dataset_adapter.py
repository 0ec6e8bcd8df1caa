"""Distributed datasets as data of `fit`, `evaluate` and `predict`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stratagem.context import has_strategy
from stratagem.input import Dataset, DistributedDataset
from stratagem.keras.training.dataset_creator import DatasetCreator, part_of, require_end
from stratagem.keras.training.unread_data import UnreadData
from stratagem.messages import explain

__all__ = ["DatasetAdapter", "adapted", "is_dataset"]

_BESIDE = ("y", "sample_weight", "class_weight")
_STEPS = {"fit": "steps_per_epoch", "evaluate": "steps", "predict": "steps"}


class DatasetAdapter(UnreadData):
    """Hands the batches of a distributed dataset to Keras, each iteration an epoch.

    Args:
        dataset: the dataset.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._num_opened = 0
        self._num_to_pass = 0
        self._unread: Iterator[Any] | None = None

    @property
    def opening(self) -> int:
        """Number of earlier passes over the dataset when the next iterator reads it."""
        return self._num_opened - (self._unread is not None)

    @property
    def can_go_to(self) -> bool:
        """True if any pass over the dataset can be read without those before it."""
        return self._dataset.order_follows_epoch

    def go_to(self, opening: int, num_batches: int) -> None:
        """Lets the next iterator begin in the middle.

        Args:
            opening: of the dataset, from 0.
            num_batches: how many batches to pass over.
        """
        if callable(close := getattr(self._unread, "close", None)):
            close()
        self._unread = None
        self._num_opened, self._num_to_pass = opening, num_batches

    @property
    def num_batches(self) -> int | None:
        """Batches of an epoch; None where that is unknown, or without end."""
        count = self._dataset.cardinality
        return count if count >= 0 else None

    def get_jax_iterator(self) -> Iterator[Any]:
        """Returns an iterator over host batches; nothing is opened before the first is asked for.

        Keras makes more iterators than it reads. Of a model that is not built it reads one batch
        to build it and begins again: with that batch, so that a generator loses nothing.
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


def _chained(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    yield first
    yield from rest


def is_dataset(value: Any) -> bool:
    """Returns True for a dataset that Keras does not support, or for a creator of one."""
    return isinstance(value, Dataset | DistributedDataset | DatasetCreator)


def adapted(strategy: Any, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Replaces distributed datasets among the arguments of `fit`, `evaluate` or `predict`.

    Args:
        strategy: of the model; the default one for a model of none.
        name: of the method.
        arguments: by name.

    Returns:
        Adapters for those that are datasets.

    Raises:
        ValueError: a dataset of another strategy, targets or weights beside a dataset, or one that
            a `DatasetCreator` makes and that never ends. TypeError: it makes none.
    """
    adapters: dict[str, Any] = {}
    for key in ("x", "validation_data"):
        if not is_dataset(value := arguments.get(key)):
            continue
        beside = [other for other in _BESIDE if key == "x" and arguments.get(other) is not None]
        if beside:
            raise ValueError(
                explain(
                    f"{name} received a {type(value).__name__} and {' and '.join(beside)}.",
                    expected="targets and weights in the batches of the dataset.",
                    fix="let it yield (x, y) or (x, y, sample_weight).",
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


def _distributed(strategy: Any, name: str, dataset: Any) -> DistributedDataset:
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
                f"{name} of a model of {strategy} received a dataset of {dataset.strategy}.",
                expected="a dataset that the model's strategy distributed.",
                fix="call distribute_dataset of model.distribute_strategy, or pass the dataset "
                "as it was before.",
            )
        )
    return dataset

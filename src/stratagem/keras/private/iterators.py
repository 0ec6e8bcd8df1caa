"""Private names of Keras's epoch iterators and data adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers.data_adapters import TorchDataLoaderAdapter

from stratagem.keras.private.access import as_open

__all__ = [
    "batches_taken",
    "first_batch",
    "goes_on_with_iterator",
    "replace_steps",
    "restore_steps",
    "set_batches_taken",
    "torch_loader",
]


def first_batch(epoch_iterator: Any) -> Any:
    """Returns the next batch of an epoch iterator, which must be reset afterward; None if empty."""
    for _, _, batches in epoch_iterator:
        return batches[0] if isinstance(batches, list | tuple) else next(batches)
    return None


def replace_steps(iterator: JAXEpochIterator, make: Callable[[Callable[[], Any]], Any]) -> None:
    """Replaces the generator of steps of one epoch iterator.

    `make` gets Keras's own generator function and returns the generator.
    """
    original = as_open(iterator)._enumerate_iterator
    as_open(iterator)._enumerate_iterator = lambda: make(original)


def restore_steps(iterator: object) -> None:
    """Restores Keras's own generator of steps on an epoch iterator."""
    vars(iterator).pop("_enumerate_iterator", None)


def goes_on_with_iterator(iterator: JAXEpochIterator) -> bool:
    """Returns True if the next epoch continues with the iterator of this one."""
    return iterator.steps_per_epoch is not None and as_open(iterator)._current_iterator is not None


def batches_taken(iterator: JAXEpochIterator) -> int:
    """Returns the number of batches taken from the current iterator of an epoch iterator."""
    return int(as_open(iterator)._steps_seen)


def set_batches_taken(iterator: JAXEpochIterator, count: int) -> None:
    """Sets the number of batches taken from the current iterator of an epoch iterator."""
    as_open(iterator)._steps_seen = count


def torch_loader(adapter: object) -> Any:
    """Returns the DataLoader of a data adapter, or None for other adapters."""
    return vars(adapter)["_dataloader"] if isinstance(adapter, TorchDataLoaderAdapter) else None

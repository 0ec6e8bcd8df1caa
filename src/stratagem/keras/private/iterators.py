"""Private names of Keras's epoch iterators and data adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from keras import tree
from keras.src.backend.jax.trainer import JAXEpochIterator
from keras.src.trainers.data_adapters import (
    ArrayDataAdapter,
    TorchDataLoaderAdapter,
    data_adapter_utils,
)
from keras.src.trainers.data_adapters.array_slicing import Sliceable, convert_to_sliceable

from stratagem.keras.private.access import as_open


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


def grouped(batches: Iterator[Any], size: int | None) -> Iterator[Any]:
    """Yields batches in the groups that Keras 3.16 scans; the batches themselves without a size.

    Older ones never ask for groups.
    """
    if not size:
        return batches
    return as_open(data_adapter_utils).super_batch_iterator(batches, size, stack_fn=jnp.stack)


def order_number(adapter: object) -> int | None:
    """Returns the number that determines the order of an adapter's next iterator.

    None before Keras 3.16, where random numbers do.
    """
    return getattr(as_open(adapter), "_epoch", None)


def set_order_number(adapter: object, number: int | None) -> None:
    """Sets the number that determines the order, if there is one."""
    if number is not None and order_number(adapter) is not None:
        as_open(adapter)._epoch = number


def torch_loader(adapter: object) -> Any:
    """Returns the DataLoader of a data adapter, or None for other adapters."""
    return vars(adapter)["_dataloader"] if isinstance(adapter, TorchDataLoaderAdapter) else None


def arrays_of(adapter: ArrayDataAdapter) -> Any:
    """Returns the arrays of a data adapter, in the structure of its batches."""
    return as_open(adapter)._inputs


def array_batches(adapter: ArrayDataAdapter, columns: list[Any]) -> Iterator[Any]:
    """Yields batches of other forms of a data adapter's arrays, in Keras's order.

    `columns` has one for each array that is present. Arrays among them become what Keras makes of
    them, and batches of all others are selected by their `__getitem__`.
    """
    remaining = iter(columns)

    def as_source(array: Any) -> Any:
        column = next(remaining)
        return convert_to_sliceable(array, target_backend="jax") if column is array else column

    def select(source: Any, indices: Any) -> Any:
        rows = source[indices]
        return source.convert_to_jax_compatible(rows) if isinstance(source, Sliceable) else rows

    structure = tree.map_structure(as_source, arrays_of(adapter), none_is_leaf=False)
    return as_open(adapter)._get_iterator(select, structure)

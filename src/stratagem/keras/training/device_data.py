"""Arrays on an accelerator as data of `fit` and its kin, without a copy on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from stratagem.contexts import get_strategy, has_strategy
from stratagem.execution.programs.elastic_lockstep import ElasticLockstep
from stratagem.input.device_rows import DeviceRows, is_on_accelerator
from stratagem.keras.patches import patches
from stratagem.keras.private import ArrayDataAdapter, array_batches, arrays_of

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


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

"""Rows of arrays that are on an accelerator, selected for many steps by one program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from stratagem.devices.mesh import Topology, is_explicit

_Selection = slice | np.ndarray


class DeviceRows:
    """Rows of an array on devices, which are selected when a group of batches is transferred.

    `rows` are consecutive rows as a slice with bounds, or their numbers. `dtype` is the type that
    the selected rows are cast to, by default the array's.
    """

    def __init__(self, array: jax.Array, rows: _Selection | None = None, dtype: Any = None) -> None:
        self.array = array
        self.rows = slice(0, array.shape[0]) if rows is None else rows
        self.dtype = np.dtype(array.dtype if dtype is None else dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes of the selected rows."""
        rows = self.rows
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        return (count, *self.array.shape[1:])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.array.ndim

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: _Selection) -> DeviceRows:
        """Returns some of the rows, which are not selected yet."""
        own = self.rows
        if not isinstance(own, slice):
            selected = own[rows]
        elif isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(own.stop - own.start)
            selected = slice(own.start + start, own.start + max(start, stop))
        elif own.start == 0 and not isinstance(rows, slice):
            selected = rows  # Columns of a batch keep one array of numbers, and share a program.
        else:
            selected = np.arange(own.start, own.stop)[rows]
        return DeviceRows(self.array, selected, self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.selected(), dtype, copy=copy)

    def selected(self) -> jax.Array:
        """Returns the rows as an array on the devices of the whole array."""
        return _select([(self, [self])], self.shape[0], (self.shape[0],), None)[0]


def is_on_accelerator(value: object) -> bool:
    """Returns True for an array of JAX on devices other than CPUs."""
    return (
        isinstance(value, jax.Array)
        and not isinstance(value, Tracer)
        and not is_explicit(value)  # its rows cannot be selected
        and next(iter(value.devices())).platform != "cpu"
    )


def with_selected_rows(data: Any) -> Any:
    """Returns a pytree with arrays in place of all `DeviceRows`."""
    return jax.tree.map(
        lambda leaf: leaf.selected() if isinstance(leaf, DeviceRows) else leaf, data
    )


def select_rows(
    columns: Sequence[Sequence[DeviceRows]],
    num_rows: int,
    shape: tuple[int, ...],
    topology: Topology,
) -> list[jax.Array]:
    """Returns the rows of several steps, one array for each column.

    A column has the rows of each step, which is filled up to `num_rows` by its last row. `shape` is
    that of all rows of all steps: steps, if several, then replicas, if several, then rows.
    Columns with the same rows, on the same devices, are selected by one program. If these are the
    devices of the strategy, each row is then on the device of its replica.
    """
    groups: dict[Any, list[int]] = {}
    for index, column in enumerate(columns):
        key = (frozenset(column[0].array.sharding.device_set), *map(_key, column))
        groups.setdefault(key, []).append(index)
    results: dict[int, jax.Array] = {}
    for (devices, *_), places in groups.items():
        is_placed = topology.all_devices is not None and set(topology.all_devices) == devices
        sharding = _sharding(topology, shape) if is_placed else None
        own = [(columns[index][0], columns[index]) for index in places]
        results.update(zip(places, _select(own, num_rows, shape, sharding), strict=True))
    return [results[index] for index in range(len(columns))]


def _key(rows: DeviceRows) -> Any:
    selected = rows.rows
    if isinstance(selected, slice):
        return selected.start, selected.stop
    return id(selected)


def _sharding(topology: Topology, shape: tuple[int, ...]) -> Sharding:
    if topology.num_replicas == 1:
        return topology.replicated
    return topology.stacked_steps if len(shape) > 2 else topology.stacked


def _select(
    columns: Sequence[tuple[DeviceRows, Sequence[DeviceRows]]],
    num_rows: int,
    shape: tuple[int, ...],
    sharding: Sharding | None,
) -> Sequence[jax.Array]:
    arrays = [first.array for first, _ in columns]
    dtypes = tuple(first.dtype for first, _ in columns)
    return _program(sharding)(arrays, _numbers(columns[0][1], num_rows), shape=shape, dtypes=dtypes)


def _numbers(column: Sequence[DeviceRows], num_rows: int) -> np.ndarray[Any, Any]:
    """Returns the number of the first of consecutive rows, or the numbers of all rows."""
    selections = [rows.rows for rows in column]
    start = _start(selections, num_rows)
    if start is not None:
        return np.asarray(start, np.int32)
    numbers: list[np.ndarray[Any, Any]] = []
    for selected in selections:
        one = np.arange(selected.start, selected.stop) if isinstance(selected, slice) else selected
        numbers.append(one[:num_rows])
        numbers.append(np.repeat(one[-1:], max(0, num_rows - len(one))))
    return np.concatenate(numbers).astype(np.int32)


def _start(selections: Sequence[_Selection], num_rows: int) -> int | None:
    """Returns the first of consecutive rows; None for other rows or if rows are missing."""
    first = selections[0]
    if not isinstance(first, slice):
        return None
    for index, rows in enumerate(selections):
        start = first.start + index * num_rows
        if not isinstance(rows, slice) or (rows.start, rows.stop) != (start, start + num_rows):
            return None
    return first.start


@functools.lru_cache(maxsize=64)
def _program(sharding: Sharding | None) -> Callable[..., list[jax.Array]]:
    static = ("shape", "dtypes")
    if sharding is None:
        return jax.jit(_rows_of, static_argnames=static)
    return jax.jit(_rows_of, static_argnames=static, out_shardings=sharding)


def _rows_of(
    arrays: list[jax.Array], numbers: jax.Array, *, shape: tuple[int, ...], dtypes: tuple[Any, ...]
) -> list[jax.Array]:
    count = int(np.prod(shape))
    results: list[jax.Array] = []
    for array, dtype in zip(arrays, dtypes, strict=True):
        if numbers.ndim:
            rows = jnp.take(array, numbers, axis=0, mode="clip")
        else:
            rows = jax.lax.dynamic_slice_in_dim(array, numbers, count)
        results.append(rows.reshape((*shape, *array.shape[1:])).astype(dtype))
    return results

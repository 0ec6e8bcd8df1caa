"""Rows that a NumPy index selects, and their split over shards."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
from jax.core import Tracer

from stratagem.errors import explain

if TYPE_CHECKING:
    pass


Rows = range | np.ndarray  # Row numbers; an array is sorted, without duplicates.


@dataclasses.dataclass(frozen=True)
class Selection:
    """Rows that an index needs (None: all), and the index into an array of these rows."""

    rows: Rows | None
    index: tuple[Any, ...]


def select_rows(index: object, shape: Sequence[int], *, name: str) -> Selection:
    """Selects the rows that a NumPy index into an array of rank 1 or more needs.

    Raises TypeError for a traced index, IndexError if out of range, and ValueError for a slice with
    step 0.

    Example:
        >>> from stratagem.variables.row_selection import select_rows
        >>> select_rows((slice(2, 9, 3), 1), (10, 4), name="table")
        Selection(rows=range(2, 9, 3), index=(slice(None, None, None), 1))
    """
    items = [_plain(item, name) for item in (index if isinstance(index, tuple) else (index,))]
    _require(tuple(items), tuple(shape), name)
    num_left = len(shape) - sum(_num_axes(item) for item in items)
    for place, item in enumerate(items):
        num_axes = num_left if item is Ellipsis else _num_axes(item)
        if num_axes and item is Ellipsis:
            break
        if num_axes:
            rows, items[place] = _first_axis(item, shape[0])
            is_all = isinstance(rows, range) and rows == range(shape[0])
            return Selection(None if is_all else rows, tuple(items))
    return Selection(None, tuple(items))


def as_slice(rows: range) -> slice:
    """Converts a range of row numbers to a slice."""
    if not rows:
        return slice(0, 0)
    return slice(rows.start, rows.stop if rows.stop >= 0 else None, rows.step)


def local_rows(rows: Rows, rows_of_shards: Sequence[int]) -> list[Rows]:
    """Splits row numbers over shards, as row numbers local to each shard.

    `rows_of_shards` is the number of consecutive rows in each shard. A range with a negative step
    is reversed first.

    Example:
        >>> from stratagem.variables.row_selection import local_rows
        >>> local_rows(range(1, 9, 3), [3, 3, 3])
        [range(1, 4, 3), range(1, 4, 3), range(1, 4, 3)]
    """
    if isinstance(rows, range) and rows.step < 0:
        rows = rows[::-1]
    ends = list(itertools.accumulate(rows_of_shards))
    found: list[Rows] = []
    for first, end in zip([0, *ends], ends, strict=False):
        part = rows[bisect.bisect_left(rows, first) : bisect.bisect_left(rows, end)]
        is_range = isinstance(part, range)
        found.append(
            range(part.start - first, part.stop - first, part.step) if is_range else part - first
        )
    return found


def _plain(item: object, name: str) -> Any:
    """Converts an index to a form that JAX accepts: it rejects lists."""
    if item is None or item is Ellipsis or isinstance(item, bool | int):
        return item
    if isinstance(item, slice):
        for bound in (item.start, item.stop, item.step):
            _require_known(bound, name)
        return item
    if isinstance(item, keras.Variable):
        item = item.value
    _require_known(item, name)
    if isinstance(item, Sequence):
        if any(isinstance(one, Tracer) for one in item):
            _require_known(next(one for one in item if isinstance(one, Tracer)), name)
        return np.asarray(item) if len(item) else np.zeros(0, np.intp)
    array = np.asarray(item)
    return array if array.ndim else array.item()


def _require_known(item: object, name: str) -> None:
    if isinstance(item, Tracer):
        raise TypeError(
            explain(
                f"Sharded variable {name!r} was indexed by the traced value {item}.",
                expected="an index that is known before the program runs.",
                fix="use sg.nn.embedding_lookup(variable, ids), or index variable.value.",
            )
        )


def _require(items: tuple[Any, ...], shape: tuple[int, ...], name: str) -> None:
    """Checks an index with NumPy, on an array of that shape that takes no memory."""
    array = np.broadcast_to(np.False_, shape)
    try:
        array[items]
    except IndexError as error:
        raise IndexError(
            explain(
                f"Sharded variable {name!r} was indexed by {items}: {error}.",
                expected=f"an index within shape {shape}.",
                fix="compare the index with variable.shape.",
            )
        ) from error
    except ValueError as error:
        raise ValueError(
            explain(
                f"Sharded variable {name!r} was indexed by {items}: {error}.",
                expected="a step other than 0.",
                fix="omit the step, or use 1 or -1.",
            )
        ) from error


def _num_axes(item: object) -> int:
    """Returns the number of axes that an index consumes."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    return item.ndim if isinstance(item, np.ndarray) and item.dtype == np.bool_ else 1


def _first_axis(item: slice | int | np.ndarray, num_rows: int) -> tuple[Rows, Any]:
    """Returns the rows that an index of axis 0 needs, and the index into these rows."""
    if isinstance(item, slice):
        return range(num_rows)[item], slice(None)
    if isinstance(item, int):
        row = item % num_rows
        return range(row, row + 1), 0
    if item.dtype == np.bool_:
        rows = np.flatnonzero(item.any(axis=tuple(range(1, item.ndim))))
        return rows, item[rows]
    rows, places = np.unique(np.where(item < 0, item + num_rows, item), return_inverse=True)
    return rows, places.reshape(item.shape)

"""Shards of variables: values, slots, partial updates, and marks of changed rows."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.server.rows import aligned_empty
from stratagem.parameter_server.server.updates import is_stored_by, own_name

__all__ = ["SavedPart", "Shard", "ShardSpec", "UpdatedPart", "made_in_pieces", "require_rows"]

# Row updates are padded, so that few shapes compile: to this many rows or a larger power of two,
# and above the second number to eighths of that power, because then copies of rows cost more.
_LEAST_ROWS, _MANY_ROWS = 64, 4096
# Tables are created and copied in pieces of this size, because memory may not hold two copies.
_PIECE_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """Consecutive rows of a variable, or the whole variable.

    Args:
        name: variable name, unique in the cluster.
        shape: shape of the shard.
        dtype: dtype name.
        first_row: index of the shard's first row within the variable.
        has_rows: True if single rows are pulled and updated; otherwise only whole values are.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    first_row: int = 0
    has_rows: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ShardSpec:
        """Returns the spec from the fields of `dataclasses.asdict`, after a JSON round trip."""
        arguments: dict[str, Any] = {**fields, "shape": tuple(fields["shape"])}
        return cls(**arguments)


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """A shard, or rows of it, in a journal.

    Args:
        spec: the shard.
        rows: row numbers within the shard, of shape (k,); None for all rows.
        value: the value, or its rows.
        slots: the slots, or their rows, by slot name.
    """

    spec: ShardSpec
    rows: np.ndarray | None
    value: Any
    slots: Mapping[str, Any]


class Shard:
    """One shard and its slots. Tables are updated in place; other arrays are only replaced.

    The value passed in for a table is modified.
    """

    def __init__(self, spec: ShardSpec, value: np.ndarray) -> None:
        self.spec = spec
        self.value: Any = value  # a rule may return another array type
        self.slots: dict[str, Any] = {}
        self.lock = threading.Lock()  # guards in-place changes of rows
        # Changed rows since `take_marks`; a single mark for a shard without rows.
        self._marks = np.ones(spec.shape[0] if spec.has_rows else 1, np.bool_)

    @property
    def size_bytes(self) -> int:
        """Size of the value and the slots, in bytes."""
        return sum(array.nbytes for array in (self.value, *list(self.slots.values())))

    @property
    def marked_bytes(self) -> int:
        """Size of the rows that a journal entry would copy, in bytes."""
        if not self.spec.has_rows:
            return 0
        return int(self.size_bytes * np.count_nonzero(self._marks) // max(1, self._marks.size))

    def array(self, slot: str | None) -> Any:
        """Returns a slot, or the value if `slot` is None."""
        return self.value if slot is None else self.slots[slot]

    def copied(self, value: np.ndarray) -> np.ndarray:
        """Returns a copy made under the row lock."""
        with self.lock:
            return value.copy()

    def mark(self, rows: np.ndarray | None = None) -> None:
        """Marks rows as changed; None marks all."""
        self._marks[... if rows is None or not self.spec.has_rows else rows] = True

    def take_marks(self) -> np.ndarray | None:
        """Returns and clears the marks; None if nothing changed."""
        if not self._marks.any():
            return None
        taken, self._marks = self._marks, np.zeros_like(self._marks)
        return taken

    def put_back(self, marks: np.ndarray) -> None:
        """Undoes `take_marks`."""
        self._marks |= marks

    def saved(self, marks: np.ndarray | None = None) -> SavedPart:
        """Returns copies of a table's marked rows, or the whole value of other shards."""
        if not self.spec.has_rows:
            return SavedPart(self.spec, None, self.value, dict(self.slots))
        assert marks is not None
        return self._copied_rows(np.flatnonzero(marks))

    def slots_of(self, optimizer: str) -> list[str]:
        """Returns the names of an optimizer's slots."""
        return [name for name in [*self.slots] if is_stored_by(optimizer, name)]

    def pieces(self, marks: np.ndarray | None = None) -> Iterator[SavedPart]:
        """Yields copies of a table's rows, all or the marked ones, in pieces of about 4 MiB."""
        count = max(1, _PIECE_BYTES * len(self._marks) // max(1, self.size_bytes))
        for first in range(0, len(self._marks), count):
            end = min(first + count, len(self._marks))
            rows = np.arange(first, end)
            if marks is not None:
                rows = rows[marks[first:end]]
            if len(rows):
                yield self._copied_rows(rows)

    def restore(self, part: SavedPart) -> None:
        """Restores values from a journal."""
        if part.rows is None:
            self.value = np.array(part.value)
            self.slots = {name: np.array(slot) for name, slot in part.slots.items()}
            return
        self.value[part.rows] = part.value
        for name, rows in part.slots.items():
            if name not in self.slots:
                self.slots[name] = np.zeros(self.spec.shape, rows.dtype)
            self.slots[name][part.rows] = rows

    def _copied_rows(self, rows: np.ndarray) -> SavedPart:
        with self.lock:
            # Iterate over a copy: an optimizer may add slots concurrently.
            slots = {name: np.take(slot, rows, axis=0) for name, slot in [*self.slots.items()]}
            return SavedPart(self.spec, rows, np.take(self.value, rows, axis=0), slots)


class UpdatedPart:
    """Values and slots that one optimizer updates: the whole shard, or distinct `rows` of it."""

    def __init__(
        self,
        shard: Shard,
        optimizer: str,
        rows: np.ndarray | None = None,
        grads: np.ndarray | None = None,
    ) -> None:
        self._shard = shard
        self._rows = rows
        self._grads = grads
        self._names = {own_name(optimizer, full): full for full in shard.slots_of(optimizer)}
        self.value = self._taken(shard.value)
        self.slots = {name: self._taken(shard.slots[full]) for name, full in self._names.items()}

    def padded_grads(self, whole: np.ndarray | None) -> np.ndarray:
        """Returns gradients with the same padded shape as `value`."""
        if self._rows is None or self._grads is None:
            assert whole is not None
            return whole
        return _padded(self._grads)

    def keep(self, value: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        """Stores the new value and slots in the shard."""
        shard = self._shard
        slots = {self._names[name]: slot for name, slot in slots.items()}
        shard.mark(self._rows)
        if self._rows is None and not shard.spec.has_rows:
            shard.value = value
            shard.slots.update(slots)
            return
        rows = slice(None) if self._rows is None else self._rows
        count = None if self._rows is None else len(self._rows)
        with shard.lock:
            # NumPy slices: JAX would compile one for each number of rows.
            shard.value[rows] = np.asarray(value)[:count]
            for name, slot in slots.items():
                shard.slots[name][rows] = np.asarray(slot)[:count]

    def _taken(self, array: np.ndarray) -> np.ndarray:
        return array if self._rows is None else _padded(np.asarray(array), self._rows)


def made_in_pieces(spec: ShardSpec, rows: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Creates the initial value of a shard in pieces of at most about 4 MiB.

    `rows` takes the first row in the variable and a row count. The shard has at least one axis.
    """
    value = np.empty(spec.shape, np.dtype(spec.dtype))
    num_rows, row_shape = spec.shape[0], spec.shape[1:]
    row_bytes = max(1, math.prod(row_shape) * value.itemsize)
    most = max(1, _PIECE_BYTES // row_bytes)
    for first in range(0, num_rows, most):
        count = min(most, num_rows - first)
        piece = np.asarray(rows(spec.first_row + first, count))
        if piece.shape != (count, *row_shape):
            raise ValueError(
                explain(
                    f"{count} rows of the initial value of {spec.name!r} were made with shape "
                    f"{piece.shape}.",
                    expected=f"shape {(count, *row_shape)}.",
                    fix="make the initializer use the row count in its `shape` argument.",
                )
            )
        value[first : first + count] = piece
    return value


def require_rows(shard: Shard, rows: np.ndarray) -> None:
    """Raises IndexError if a row number is out of range."""
    num_rows = shard.spec.shape[0] if shard.spec.shape else 0
    valid = (
        f"rows 0 to {num_rows - 1} of this shard" if num_rows else "no rows: this shard has none"
    )
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= num_rows):
        raise IndexError(
            explain(
                f"Rows {int(rows.min())} to {int(rows.max())} of {shard.spec.name!r} were "
                "requested.",
                expected=f"{valid}.",
                fix="look up only ids within the table.",
                code="SG607",
            )
        )


def _padded(array: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    """Pads an array, or rows of it, with zeros to one of few sizes, so that few shapes compile."""
    count = len(array) if rows is None else len(rows)
    size = max(_LEAST_ROWS, 1 << (count - 1).bit_length() if count else 0)
    if size > _MANY_ROWS:
        size = -(-count // (size // 8)) * (size // 8)
    if size == count and rows is None:
        return array
    padded = aligned_empty((size, *array.shape[1:]), array.dtype)
    if rows is None:
        padded[:count] = array
    else:  # "clip" copies directly: the row numbers are valid
        np.take(array, rows, axis=0, out=padded[:count], mode="clip")
    padded[count:] = 0
    return padded

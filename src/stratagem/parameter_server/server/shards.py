"""One shard of a variable with its slots, what an update changes of it, and what has changed."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.server.updates import is_kept_by, own_name

__all__ = ["SavedPart", "Shard", "ShardSpec", "UpdatedPart", "made_in_pieces", "require_rows"]

# Rows are updated in arrays of these many rows or twice as many, so that few shapes are compiled.
_LEAST_ROWS = 64
# Of a table that is made or copied piece by piece, beside which little else needs to have room.
_PIECE_BYTES = 2**22


@dataclasses.dataclass(frozen=True)
class ShardSpec:
    """Consecutive rows of a variable, or all of it.

    Args:
        name: of the variable, unique in the cluster.
        shape: of the shard.
        dtype: its dtype.
        first_row: where it begins in the variable.
        has_rows: whether single rows of it are pulled and updated; else it always travels whole.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    first_row: int = 0
    has_rows: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ShardSpec:
        """Returns the spec that `dataclasses.asdict` and JSON made fields of."""
        told: dict[str, Any] = {**fields, "shape": tuple(fields["shape"])}
        return cls(**told)


@dataclasses.dataclass(frozen=True)
class SavedPart:
    """A shard, or rows of it, as a journal holds it.

    Args:
        spec: of the shard.
        rows: numbers within the shard, of shape (k,); None for all.
        value: of these rows.
        slots: of these rows, by name.
    """

    spec: ShardSpec
    rows: np.ndarray | None
    value: Any
    slots: Mapping[str, Any]


class Shard:
    """One shard and its slots. Whole arrays are replaced and never changed; rows are changed.

    Args:
        spec: what it is.
        value: of its shape; of a table it is changed.
    """

    def __init__(self, spec: ShardSpec, value: np.ndarray) -> None:
        self.spec = spec
        self.value: Any = value  # what the rule returns, once it was updated
        self.slots: dict[str, Any] = {}
        self.lock = threading.Lock()  # of rows that are changed
        # Which rows have changed since they were taken; one for all of what is replaced.
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
        """Returns the value, or a slot."""
        return self.value if slot is None else self.slots[slot]

    def copied(self, value: np.ndarray) -> np.ndarray:
        """Returns a copy of a table that nobody changes meanwhile."""
        with self.lock:
            return value.copy()

    def mark(self, rows: np.ndarray | None = None) -> None:
        """Notes that these rows have changed, or all."""
        self._marks[... if rows is None or not self.spec.has_rows else rows] = True

    def take_marks(self) -> np.ndarray | None:
        """Returns what has changed since the last call; None for nothing."""
        if not self._marks.any():
            return None
        taken, self._marks = self._marks, np.zeros_like(self._marks)
        return taken

    def put_back(self, marks: np.ndarray) -> None:
        """Undoes `take_marks`."""
        self._marks |= marks

    def saved(self, marks: np.ndarray | None = None) -> SavedPart:
        """Returns what has changed, or the whole of what is replaced; of a table a copy."""
        if not self.spec.has_rows:
            return SavedPart(self.spec, None, self.value, dict(self.slots))
        assert marks is not None
        return self._copied_rows(np.flatnonzero(marks))

    def slots_of(self, optimizer: str) -> list[str]:
        """Returns the names of the slots that an optimizer keeps here."""
        return [name for name in [*self.slots] if is_kept_by(optimizer, name)]

    def pieces(self, marks: np.ndarray | None = None) -> Iterator[SavedPart]:
        """Returns copies of rows of a table, some at a time.

        Args:
            marks: which; None for all.
        """
        count = max(1, _PIECE_BYTES * len(self._marks) // max(1, self.size_bytes))
        for first in range(0, len(self._marks), count):
            end = min(first + count, len(self._marks))
            rows = np.arange(first, end)
            if marks is not None:
                rows = rows[marks[first:end]]
            if len(rows):
                yield self._copied_rows(rows)

    def restore(self, part: SavedPart) -> None:
        """Takes the values that a journal had."""
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
            # Of a copy: an optimizer may add slots meanwhile.
            slots = {name: np.take(slot, rows, axis=0) for name, slot in [*self.slots.items()]}
            return SavedPart(self.spec, rows, np.take(self.value, rows, axis=0), slots)


class UpdatedPart:
    """Part of a shard that an update changes: all of it, or some rows.

    Args:
        shard: the shard.
        optimizer: whose slots are changed.
        rows: their numbers, each once; None for all.
        grads: of these rows.
    """

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
        """Returns gradients of the shape that the value has here."""
        if self._rows is None or self._grads is None:
            assert whole is not None
            return whole
        return _padded(self._grads)

    def keep(self, value: np.ndarray, slots: Mapping[str, np.ndarray]) -> None:
        """Puts new values and slots in the place of those here."""
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
            # As arrays of NumPy: JAX would compile a slice for each number of rows.
            shard.value[rows] = np.asarray(value)[:count]
            for name, slot in slots.items():
                shard.slots[name][rows] = np.asarray(slot)[:count]

    def _taken(self, array: np.ndarray) -> np.ndarray:
        return array if self._rows is None else _padded(np.take(array, self._rows, axis=0))


def made_in_pieces(spec: ShardSpec, rows: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """Makes the initial value of a shard, some rows at a time.

    Args:
        spec: of the shard, which has at least one axis.
        rows: a function of the first row in the variable and the number of rows.

    Returns:
        Array of the shard's shape and dtype.

    Raises:
        ValueError: the function has returned rows of another shape.
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
                    fix="let the initializer use the number of rows that it is given.",
                )
            )
        value[first : first + count] = piece
    return value


def require_rows(shard: Shard, rows: np.ndarray) -> None:
    """Checks that a shard has rows.

    Args:
        shard: the shard.
        rows: their numbers.

    Raises:
        IndexError: no such row.
    """
    num_rows = shard.spec.shape[0] if shard.spec.shape else 0
    if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= num_rows):
        raise IndexError(
            explain(
                f"Rows {int(rows.min())} to {int(rows.max())} of {shard.spec.name!r} were asked "
                "for.",
                expected=f"rows 0 to {num_rows - 1} of this shard.",
                fix="look up ids that the table has.",
            )
        )


def _padded(array: np.ndarray) -> np.ndarray:
    """The array with rows of zeros after it, so that its size is one of few."""
    size = max(_LEAST_ROWS, 1 << (len(array) - 1).bit_length() if len(array) else 0)
    if size == len(array):
        return array
    return np.concatenate([array, np.zeros((size - len(array), *array.shape[1:]), array.dtype)])

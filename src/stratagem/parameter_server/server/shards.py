"""Shards of variables: values, slots, partial updates, and marks of changed rows."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from scipy.sparse import csc_array

from stratagem.errors import check_number, invalid

# Row ids of tables, and sums of rows with equal ids.

# Multipliers of two independent hashes: Knuth's, and that of rrmxmx.
_HASHES = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))
_HALF = np.uint64(32)
# JAX uses an array in place only if its address is aligned to this.
_ALIGNMENT = 64


def combine_rows(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sums rows with equal ids, and returns the distinct ids and their sums.

    `ids` has shape (k,) in any order, `rows` shape (k, ...). Rows of one id are added in input
    order.
    """
    found, places = distinct(ids)
    return found, sum_rows(places, len(found), rows)


def sum_rows(places: np.ndarray, num_sums: int, rows: np.ndarray) -> np.ndarray:
    """Adds each row to the sum at its place, in input order.

    `places` has shape (k,), `rows` shape (k, ...), the result (num_sums, ...). Half-precision rows
    are added in single precision.
    """
    if not rows.size:
        return np.zeros((num_sums, *rows.shape[1:]), rows.dtype)
    flat = rows.reshape(len(rows), -1)
    if flat.dtype.kind in "fV" and flat.dtype.itemsize < 4:  # unknown to SciPy
        flat = flat.astype(np.float32)
    # A matrix with a single 1 per column: each row is read once, in order. NumPy needs copies.
    columns = np.arange(len(rows) + 1, dtype=places.dtype)
    matrix = csc_array((np.ones(len(rows), flat.dtype), places, columns), (num_sums, len(rows)))
    return (matrix @ flat).astype(rows.dtype, copy=False).reshape(num_sums, *rows.shape[1:])


def distinct(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct integers of an array of shape (k,), and the place of each among them.

    Each id writes its position to a hash table, from which equal ids read the same position. A sort
    takes four to six times as long without wide vectors (5 ms for 100,000 ids). Ids that share an
    entry try a second hash, and the few that are left are sorted. Equal arrays give equal orders.
    """
    positions = np.arange(len(ids), dtype=np.int32)
    keys, bits = ids.astype(np.uint64), max(2 * len(ids) - 1, 1).bit_length()
    shift, table = np.uint64(64 - bits), np.empty(1 << bits, np.int32)
    entries = ((keys * _HASHES[0]) >> shift).view(np.int64)
    table[entries] = positions
    found = table[entries]
    left = np.flatnonzero(keys[found] != keys)
    if len(left):
        own = keys[left]
        entries = (((own ^ (own >> _HALF)) * _HASHES[1]) >> shift).view(np.int64)
        table[entries] = left
        found[left] = table[entries]
        left = left[keys[found[left]] != own]
    if len(left):
        _, firsts, places = np.unique(keys[left], return_index=True, return_inverse=True)
        found[left] = left[firsts[places]]
    firsts = np.flatnonzero(found == positions)
    numbers = np.empty(len(ids), np.int32)
    numbers[firsts] = np.arange(len(firsts), dtype=np.int32)
    return ids[firsts], numbers[found]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array at an address that JAX uses in place."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


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
        table: options of a table whose rows are found by key, as JSON; None for other variables.
            The shape then has 0 rows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    first_row: int = 0
    has_rows: bool = False
    table: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

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
        table: keys of the rows of a keyed table; None for other variables.
    """

    spec: ShardSpec
    rows: np.ndarray | None
    value: Any
    slots: Mapping[str, Any]
    table: Any = None


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

    def require(self, rows: np.ndarray) -> None:
        """Raises IndexError if a row number is out of range."""
        num_rows = self.spec.shape[0] if self.spec.shape else 0
        if len(rows) and (int(rows.min()) < 0 or int(rows.max()) >= num_rows):
            wanted = f"Rows {int(rows.min())} to {int(rows.max())}"
            raise IndexError(f"{wanted} of {self.spec.name!r} were requested: it has {num_rows}")

    def pulled(self, slot: str | None, rows: np.ndarray) -> np.ndarray:
        """Returns copies of rows of a slot, or of the value if `slot` is None."""
        with self.lock:
            return np.take(np.asarray(self.array(slot)), rows, axis=0)

    def expanded(self, slot: str | None, pulled: np.ndarray) -> np.ndarray:
        """Returns the result of `pulled` as updates compute with it."""
        return pulled

    def scatter(self, slot: str | None, rows: np.ndarray, values: np.ndarray, sign: int) -> None:
        """Assigns rows of a table (`sign=0`), or adds to them."""
        current = np.asarray(self.array(slot))
        new = values if sign == 0 else np.take(current, rows, axis=0) + sign * values
        self.mark(rows)
        with self.lock:
            current[rows] = new

    def updated(
        self, optimizer: str, rows: np.ndarray | None, grads: np.ndarray | None, version: int
    ) -> UpdatedPart:
        """Returns what an optimizer updates: the whole shard, or distinct rows of it.

        `version` is that of the update.
        """
        return UpdatedPart(self, optimizer, rows, grads)

    def add_slot(self, name: str, slot: Slot) -> None:
        """Adds a slot of an optimizer."""
        self.slots[name] = np.full(self.spec.shape, slot.initial, np.dtype(slot.dtype))
        self.mark()

    def drop_slot(self, name: str) -> None:
        """Removes a slot of an optimizer."""
        del self.slots[name]

    def mark(self, rows: np.ndarray | None = None) -> None:
        """Marks rows as changed; None marks all."""
        self._marks[... if rows is None or not self.spec.has_rows else rows] = True

    def take_marks(self) -> Any:
        """Returns and clears the marks; None if nothing changed."""
        if not self._marks.any():
            return None
        taken, self._marks = self._marks, np.zeros_like(self._marks)
        return taken

    def put_back(self, marks: Any) -> None:
        """Undoes `take_marks`."""
        self._marks |= marks

    def saved(self, marks: Any = None) -> SavedPart:
        """Returns copies of a table's marked rows, or the whole value of other shards."""
        if not self.spec.has_rows:
            return SavedPart(self.spec, None, self.value, dict(self.slots))
        assert marks is not None
        return self._copied_rows(np.flatnonzero(marks))

    def slots_of(self, optimizer: str) -> list[str]:
        """Returns the names of an optimizer's slots."""
        return [name for name in [*self.slots] if is_stored_by(optimizer, name)]

    def pieces(self, marks: Any = None) -> Iterator[SavedPart]:
        """Yields copies of a table's rows, all or the marked ones, in pieces of about 4 MiB."""
        count = piece_rows(self.size_bytes, len(self._marks))
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

    def restored(self) -> None:
        """Completes a restoration."""

    def _copied_rows(self, rows: np.ndarray) -> SavedPart:
        with self.lock:
            # Iterate over a copy: an optimizer may add slots concurrently.
            slots = {name: np.take(slot, rows, axis=0) for name, slot in [*self.slots.items()]}
            return SavedPart(self.spec, rows, np.take(self.value, rows, axis=0), slots)


class UpdatedPart:
    """Values and slots that one optimizer updates: the whole shard, or distinct `rows` of it.

    `num_refused` row gradients were dropped, because their keys have no row.
    """

    num_refused = 0

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
        self.value = self._taken(None)
        self.slots = {name: self._taken(full) for name, full in self._names.items()}

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

    def _taken(self, slot: str | None) -> Any:
        array = self._shard.array(slot)
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
            raise ValueError(f"initial rows of {spec.name!r} have the shape {piece.shape}")
        value[first : first + count] = piece
    return value


def piece_rows(size_bytes: int, num_rows: int) -> int:
    """Returns the number of rows of a piece, given those of a table and their size."""
    return max(1, _PIECE_BYTES * num_rows // max(1, size_bytes))


def padded_empty(count: int, row_shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an array for `count` rows, padded with zeros to one of few sizes."""
    padded = aligned_empty((padded_size(count), *row_shape), dtype)
    padded[count:] = 0
    return padded


def padded_size(count: int) -> int:
    """Returns the number of rows of an update with so many, padded."""
    size = max(_LEAST_ROWS, 1 << (count - 1).bit_length() if count else 0)
    return size if size <= _MANY_ROWS else -(-count // (size // 8)) * (size // 8)


def _padded(array: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    """Pads an array, or rows of it, with zeros to one of few sizes, so that few shapes compile."""
    count = len(array) if rows is None else len(rows)
    if padded_size(count) == count and rows is None:
        return array
    padded = padded_empty(count, array.shape[1:], array.dtype)
    if rows is None:
        padded[:count] = array
    else:  # "clip" copies directly: the row numbers are valid
        np.take(array, rows, axis=0, out=padded[:count], mode="clip")
    return padded


# Update rules: optimizers that clients send to servers.


@dataclasses.dataclass(frozen=True)
class Slot:
    """Optimizer state of a variable, with the variable's shape.

    Args:
        name: unique among the variable's slots.
        dtype: dtype name.
        initial: initial value of each element.
    """

    name: str
    dtype: str
    initial: float


@dataclasses.dataclass(frozen=True)
class State:
    """State that a rule updates.

    Args:
        scalars: state shared by all variables, such as the step count, by name.
        values: variable values, by variable name.
        slots: slots by variable name, then by slot name.
        rows: names of the values that are some rows of a table, padded with zeros.
    """

    scalars: Mapping[str, np.ndarray]
    values: Mapping[str, np.ndarray]
    slots: Mapping[str, Mapping[str, np.ndarray]]
    rows: Sequence[str] = ()


class UpdateRule(Protocol):
    """An optimizer as servers see it. It must treat all rows alike, to support row updates."""

    def scalars(self) -> dict[str, np.ndarray]:
        """Returns the initial scalars shared by all variables."""
        ...

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        """Returns the slots of a variable or of its shard."""
        ...

    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        """Returns the state after one update; does not modify or alias its inputs.

        `state` holds only variables that have gradients: all rows or some. `grads` has the same
        names and shapes as the values. Its memory is reused after the call.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """Returns a JSON-serializable description; different rules return different ones."""
        ...


@dataclasses.dataclass(frozen=True)
class UpdateMode:
    """Synchronous or asynchronous updates, and the staleness limit.

    Args:
        num_needed: number of workers whose gradients are summed and applied at once; 0 applies each
            worker's gradients on arrival.
        max_staleness: discard gradients computed from values more than this many updates old; None
            for no limit. For asynchronous updates only: synchronous ones discard all stale
            gradients.

    Raises:
        ValueError: a negative number, or both are set.
    """

    num_needed: int = 0
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        owner, limit = "ParameterServerStrategy", self.max_staleness
        check_number(owner, 0, num_needed=self.num_needed)
        check_number(owner, 0, or_none=True, max_staleness=limit)
        if self.num_needed and limit is not None:
            raise invalid(
                f"{self} limits the staleness of synchronous updates.",
                expected="max_staleness only with num_needed=0.",
                fix="omit max_staleness: synchronous updates discard all stale gradients.",
            )


ASYNCHRONOUS = UpdateMode()


@dataclasses.dataclass(frozen=True)
class Pushed:
    """Result of a gradient push.

    Args:
        is_used: False if every server discarded its part as stale. A worker then recomputes the
            gradients from new values, or continues with its next batch.
        num_discarded: number of servers that discarded their part.
        version: smallest version among the servers in the request.
        values: requested whole variables right after the update, by name; read-only.
    """

    is_used: bool
    num_discarded: int
    version: int
    values: Mapping[str, np.ndarray]


def stored_name(optimizer: str, name: str) -> str:
    """Returns the full name of an optimizer's slot or scalar.

    Neither part may contain a dot. `optimizer` is "" if there is only one.
    """
    return f"{optimizer}.{name}" if optimizer else name


def own_name(optimizer: str, name: str) -> str:
    """Returns the optimizer's own name for a slot or scalar: the inverse of `stored_name`."""
    return name[len(optimizer) + 1 :] if optimizer else name


def is_stored_by(optimizer: str, name: str) -> bool:
    """Returns True if a `stored_name` belongs to an optimizer."""
    return name.rpartition(".")[0] == optimizer

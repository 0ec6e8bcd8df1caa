"""`ShardedVariable`: several variables used as one, split along axis 0."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.errors import explain, invalid
from stratagem.variables.distributed import IndexedSlices

# Scatter updates of an array's rows: add, multiply, minimum and others.

# Indices past the end are padding.
_APPLY: dict[str, Callable[[Any, Any], Any]] = {
    "scatter_add": lambda rows, values: rows.add(values, mode="drop"),
    "scatter_sub": lambda rows, values: rows.add(-values, mode="drop"),
    "scatter_mul": lambda rows, values: rows.multiply(values, mode="drop"),
    "scatter_div": lambda rows, values: rows.divide(values, mode="drop"),
    "scatter_min": lambda rows, values: rows.min(values, mode="drop"),
    "scatter_max": lambda rows, values: rows.max(values, mode="drop"),
    "scatter_update": lambda rows, values: rows.set(values, mode="drop"),
}
_SETTING = ("scatter_min", "scatter_max", "scatter_update")


def sets_rows(method: str) -> bool:
    """Returns True if a method such as "scatter_min" does not first sum rows of equal index."""
    return method in _SETTING


def changed_rows(method: str, value: object, slices: IndexedSlices) -> jax.Array:
    """Applies a method such as "scatter_add" to rows of an array of shape (n, ...).

    Indices past the end are ignored.

    Example:
        >>> from stratagem.variables.sharded_variable import changed_rows
        >>> rows = sg.IndexedSlices(jax.numpy.array([5.0, 5.0]), jax.numpy.array([1, 1]))
        >>> changed_rows("scatter_mul", jax.numpy.ones(3), rows)
        Array([ 1., 10.,  1.], dtype=float32)
    """
    if not sets_rows(method):
        slices = slices.combined()
    value = jnp.asarray(value)
    rows = value.at[jnp.asarray(slices.indices)]
    return _APPLY[method](rows, jnp.asarray(slices.values, value.dtype))


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARING = ("eq", "ne", "lt", "le", "gt", "ge")
_UNARY = ("neg", "pos", "abs", "invert")


class ScatterMethods:
    """Scatter methods of variables; subclasses implement `_scatter`."""

    def _scatter(self, method: str, sparse_delta: object) -> Any:
        raise NotImplementedError

    def scatter_add(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Adds rows. Call anywhere.

        Args:
            sparse_delta: rows of shape (k, ...) and their indices.
            use_locking: ignored; accepted for compatibility with TensorFlow.
            name: ignored, likewise.

        Returns:
            The new value.

        Raises:
            TypeError: not `IndexedSlices`, or `PerReplica` ones where they cannot be aggregated.
            NotImplementedError: an ON_READ variable.
            ValueError: aggregation NONE and rows that differ between replicas.

        Example:
            >>> with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
            ...     v = sg.Variable([1.0, 2.0])
            >>> v.scatter_add(sg.IndexedSlices(jax.numpy.array([5.0]), jax.numpy.array([1])))
            Array([1., 7.], dtype=float32)

        Source: TF 2.21 values.py, DistributedVariable.scatter_add.
        """
        return self._scatter("scatter_add", sparse_delta)

    def scatter_sub(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Subtracts rows; otherwise as `scatter_add`."""
        return self._scatter("scatter_sub", sparse_delta)

    def scatter_mul(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Multiplies rows; otherwise as `scatter_add`."""
        return self._scatter("scatter_mul", sparse_delta)

    def scatter_div(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Divides rows; otherwise as `scatter_add`."""
        return self._scatter("scatter_div", sparse_delta)

    def scatter_min(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Sets rows to the minimum of their value and the given one. Call anywhere.

        Args:
            sparse_delta: rows of shape (k, ...) and their indices.
            use_locking: ignored; accepted for compatibility with TensorFlow.
            name: ignored, likewise.

        Returns:
            The new value.

        Raises:
            NotImplementedError: in a replica function with aggregation SUM or MEAN, or an ON_READ
                variable. Otherwise as `scatter_add`.

        Source: TF 2.21 values.py, DistributedVariable.scatter_min.
        """
        return self._scatter("scatter_min", sparse_delta)

    def scatter_max(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Sets rows to the maximum of their value and the given one; otherwise as `scatter_min`."""
        return self._scatter("scatter_max", sparse_delta)

    def scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Sets rows; otherwise as `scatter_min`."""
        return self._scatter("scatter_update", sparse_delta)


class ShardedVariable(ScatterMethods):
    """A variable split into shards: variables that each store consecutive rows.

    A `ParameterServerStrategy` with a partitioner creates such variables, with shards on its
    servers; these are Keras variables too. One created from a list is not: pass its `variables` to
    Keras layers and optimizers.

    Arithmetic and array arguments use its value. `variable[...]` and
    `sg.nn.embedding_lookup(variable, ids)` read only the rows they need.

    Args:
        variables: the shards: Keras variables that differ in shape only on axis 0.
        name: name of the variable.

    Raises:
        TypeError: `variables` is not a list of Keras variables.
        ValueError: the shards are scalars, or differ in dtype or in shape beyond axis 0.

    Example:
        >>> shards = [keras.Variable([[1.0, 2.0], [3.0, 4.0]]), keras.Variable([[5.0, 6.0]])]
        >>> table = sg.ShardedVariable(shards, name="table")
        >>> table.shape, [shard.shape for shard in table]
        ((3, 2), [(2, 2), (1, 2)])
        >>> table[::-2]
        Array([[5., 6.],
               [1., 2.]], dtype=float32)
        >>> rows = sg.IndexedSlices(jax.numpy.array([[10.0, 10.0]]), jax.numpy.array([2]))
        >>> table.scatter_add(rows)[2]
        Array([15., 16.], dtype=float32)

    Source: TF 2.21 sharded_variable.py, ShardedVariable.
    """

    _variables: Sequence[Any]

    def __init__(self, variables: Sequence[keras.Variable], name: str = "ShardedVariable") -> None:
        _check(variables)
        self._variables = list(variables)
        self._shard_name = name

    @property
    def variables(self) -> list[Any]:
        """The shards, in the order of their rows."""
        return list(self._variables)

    @property
    def name(self) -> str:
        """Name of the variable."""
        return self._shard_name

    @property
    def dtype(self) -> str:
        """Dtype of all shards."""
        return self._variables[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole variable."""
        return (sum(self._num_rows()), *self._variables[0].shape[1:])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def value(self) -> jax.Array:
        """All rows, as one JAX array."""
        return jnp.concatenate([one.value for one in self._variables])

    def numpy(self) -> np.ndarray:
        """Returns all rows, as one NumPy array."""
        return np.asarray(self)

    def __array__(
        self, dtype: np.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        return np.concatenate([np.asarray(one.value) for one in self._variables]).astype(
            dtype or jnp.dtype(self.dtype), copy=False
        )

    def __jax_array__(self) -> jax.Array:
        return self.value

    def __repr__(self) -> str:
        return (
            f"<ShardedVariable name={self.name}, shape={self.shape}, dtype={self.dtype}, "
            f"{len(self)} shards>"
        )

    def __len__(self) -> int:
        return len(self._variables)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.variables)

    def __getitem__(self, index: object) -> jax.Array:
        selected = select_rows(index, self.shape, name=self.name)
        rows = self.value if selected.rows is None else self.take_rows(selected.rows)
        return jnp.asarray(rows[selected.index])

    def take_rows(self, rows: Rows) -> Any:
        """Reads some rows.

        Args:
            rows: row numbers, in range and not traced; an array must be sorted, without duplicates.

        Returns:
            Array of shape (len(rows), ...).
        """
        pairs = zip(self._variables, local_rows(rows, self._num_rows()), strict=True)
        parts = [_taken(shard, own) for shard, own in pairs if len(own)]
        if not parts:
            return np.zeros((0, *self.shape[1:]), jnp.dtype(self.dtype))
        joined = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
        return joined[::-1] if isinstance(rows, range) and rows.step < 0 else joined

    def assign(self, value: object) -> Any:
        """Sets all rows.

        Args:
            value: array of the variable's shape.

        Returns:
            The variable; in a replica function with parameter servers, the new value.

        Raises:
            ValueError: `value` has another shape.
        """
        return self._assign("assign", value)

    def assign_add(self, value: object) -> Any:
        """Adds a value, which may broadcast; otherwise like `assign`."""
        return self._assign("assign_add", value)

    def assign_sub(self, value: object) -> Any:
        """Subtracts a value, which may broadcast; otherwise like `assign`."""
        return self._assign("assign_sub", value)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, use_locking: bool = False, name: str | None = None
    ) -> Any:
        """Same as `scatter_update`, because indices have one axis."""
        return self.scatter_update(sparse_delta)

    def _num_rows(self) -> list[int]:
        return [one.shape[0] for one in self._variables]

    def _assign(self, method: str, value: object) -> Any:
        if isinstance(value, keras.Variable | ShardedVariable):
            value = value.value
        value = value if isinstance(value, jax.Array) else np.asarray(value)
        is_whole = value.shape == self.shape
        if not is_whole and (method == "assign" or not _broadcasts(value.shape, self.shape)):
            raise invalid(
                f"{method} of sharded variable {self.name!r} received a value of shape "
                f"{value.shape}.",
                expected=f"shape {self.shape}.",
                fix="pass all rows, or use scatter_update to set some rows.",
            )
        if not is_whole:
            broadcast = jnp.broadcast_to if isinstance(value, jax.Array) else np.broadcast_to
            value = broadcast(value, self.shape)
        first = 0
        for shard in self._variables:
            getattr(shard, method)(value[first : first + shard.shape[0]])
            first += shard.shape[0]
        return self

    def _scatter(self, method: str, sparse_delta: object) -> Any:
        if not isinstance(sparse_delta, IndexedSlices):
            raise TypeError(
                explain(
                    f"{method} of sharded variable {self.name!r} received a value of type "
                    f"{type(sparse_delta).__name__}.",
                    expected="sg.IndexedSlices.",
                    fix="pass sg.IndexedSlices(values, indices).",
                )
            )
        sparse_delta.check()
        for shard, own in shards_of(self, sparse_delta.indices):
            slices = _slices_in(sparse_delta.values, *own)
            if not len(slices.indices):
                continue
            if hasattr(shard, method):
                getattr(shard, method)(slices)
            else:
                shard.assign(changed_rows(method, shard.value, slices))
        return self


def shards_of(variable: ShardedVariable, ids: object) -> Iterator[tuple[Any, tuple[Any, Any]]]:
    """Yields each shard with the rows' local numbers and a mask of the rows that it stores.

    `ids` are row numbers of the whole variable, of any shape and possibly traced; -1 is the last
    row. Both results have the shape of `ids`.
    """
    if not isinstance(ids, Tracer):
        ids = np.asarray(ids).astype(np.int64)
        ids = np.where(ids < 0, ids + variable.shape[0], ids)
    else:
        # Smaller dtypes may overflow.
        ids = ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids
        ids = jnp.where(ids < 0, ids + variable.shape[0], ids)
    first = 0
    for shard in variable.variables:
        own = ids - first
        yield shard, (own, (own >= 0) & (own < shard.shape[0]))
        first += shard.shape[0]


def _slices_in(
    values: object, ids: jax.Array | np.ndarray, are_own: jax.Array | np.ndarray
) -> IndexedSlices:
    """Returns a shard's slices; if traced, all slices, with other rows' indices past the end."""
    if isinstance(ids, Tracer):
        return IndexedSlices(values, jnp.where(are_own, ids, jnp.iinfo(ids.dtype).max))
    return IndexedSlices(jnp.asarray(values)[are_own], ids[are_own])


def _taken(shard: keras.Variable, rows: Rows) -> Any:
    take = getattr(shard, "take_rows", None)
    if take is not None:
        return take(rows)
    return shard.value[as_slice(rows) if isinstance(rows, range) else rows]


def _broadcasts(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    ends = zip(reversed(shape), reversed(whole), strict=False)
    return len(shape) <= len(whole) and all(one in (1, other) for one, other in ends)


def _check(variables: Iterable[keras.Variable]) -> None:
    is_list = isinstance(variables, Sequence) and len(variables) > 0
    if not is_list or not all(isinstance(one, keras.Variable) for one in variables):
        raise TypeError(
            explain(
                f"ShardedVariable received {variables!r}.",
                expected="a non-empty list of Keras variables.",
                fix="create them with sg.Variable or keras.Variable.",
            )
        )
    shapes = [tuple(one.shape) for one in variables]
    dtypes = [one.dtype for one in variables]
    if len(set(dtypes)) > 1:
        raise invalid(
            f"ShardedVariable received shards of dtypes {dtypes}.",
            expected="shards of the same dtype.",
            fix="create the variables with the same dtype.",
        )
    if () in shapes or len({shape[1:] for shape in shapes}) > 1:
        raise invalid(
            f"ShardedVariable received shards of shapes {shapes}.",
            expected="shapes that differ only in the number of rows, on axis 0.",
            fix="split the whole array along axis 0.",
        )


def _of_value(function: Callable[..., Any], *, is_reflected: bool = False) -> Callable[..., Any]:
    def call(self: ShardedVariable, *others: object) -> Any:
        return function(*others, self.value) if is_reflected else function(self.value, *others)

    return call


def _overload_operators() -> None:
    for name in (*_BINARY, *_COMPARING, *_UNARY):
        setattr(ShardedVariable, f"__{name}__", _of_value(getattr(operator, f"__{name}__")))
    for name in _BINARY:
        function = getattr(operator, f"__{name}__")
        setattr(ShardedVariable, f"__r{name}__", _of_value(function, is_reflected=True))


_overload_operators()


# Rows that a NumPy index selects, and their split over shards.


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
        >>> from stratagem.variables.sharded_variable import select_rows
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
        >>> from stratagem.variables.sharded_variable import local_rows
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
        raise invalid(
            f"Sharded variable {name!r} was indexed by {items}: {error}.",
            expected="a step other than 0.",
            fix="omit the step, or use 1 or -1.",
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

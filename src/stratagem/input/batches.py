"""Batches on the host, split over replicas into padded parts of equal size."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import sparse
from jax.sharding import Sharding

from stratagem.devices.mesh import Topology, is_explicit
from stratagem.errors import check_number, invalid

# Rows of arrays that are on an accelerator, selected for many steps by one program.


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


# Sizes of per-replica parts of a batch, and of per-step parts of a worker's stream.


def split_lengths(num_examples: int, num_replicas: int) -> tuple[int, tuple[int, ...] | None]:
    """Splits B examples over n replicas: each takes ceil(B / n) until none are left.

    Returns the per-replica size and the true lengths by replica, or None if all equal the size.
    Source: TF 2.21 input_lib.py and data/experimental/ops/distribute.py, _RebatchDataset.
    """
    size = -(-num_examples // num_replicas)
    if size * num_replicas == num_examples:
        return size, None
    return size, tuple(min(size, max(0, num_examples - i * size)) for i in range(num_replicas))


def batch_sizes_for_worker(
    global_batch_size: int, num_workers: int, num_replicas_per_worker: int, worker_index: int
) -> list[int]:
    """Returns the sizes into which a worker that reads its own files cuts its stream.

    The sizes repeat forever, `num_replicas_per_worker` of them per step. In each step, all workers
    together use `global_batch_size` examples.

    Args:
        global_batch_size: examples of all replicas per step.
        num_workers: W.
        num_replicas_per_worker: R.
        worker_index: 0 <= worker_index < W.

    Returns:
        W * R sizes that differ by at most one.

    Raises:
        ValueError: a size that is not positive, or an index out of range.

    Example:
        >>> sg.input.batch_sizes_for_worker(7, 2, 2, worker_index=1)
        [2, 1, 2, 2]

    Source: TF 2.21 data/experimental/ops/distribute.py, batch_sizes_for_worker.
    """
    check_number(
        "batch_sizes_for_worker",
        global_batch_size=global_batch_size,
        num_workers=num_workers,
        num_replicas_per_worker=num_replicas_per_worker,
    )
    if not 0 <= worker_index < num_workers:
        raise invalid(
            f"worker_index={worker_index} is out of range for {num_workers} workers.",
            expected=f"0 <= worker_index < {num_workers}.",
            fix="count workers from 0.",
        )
    num_parts = num_workers * num_replicas_per_worker
    smaller, num_larger = divmod(global_batch_size, num_parts)
    parts = [smaller + 1] * num_larger + [smaller] * (num_parts - num_larger)
    start = worker_index * num_replicas_per_worker
    return parts[start:] + parts[:start]


# Conversion of sparse arrays to rows of equal width, which split and pad like dense arrays.


@jax.tree_util.register_pytree_node_class
class SparseRows:
    """A sparse array with the same number of entries in each row.

    A pytree that becomes a BCOO array when its leaves are JAX arrays, as in a replica function.
    `values` have shape (rows, entries), `indices` (rows, entries, rank - 1); padding indices are
    out of bounds. `shape` is the shape of a row.
    """

    def __init__(self, values: Any, indices: Any, shape: tuple[int, ...]) -> None:
        self.values = values
        self.indices = indices
        self.shape = shape

    def __repr__(self) -> str:
        return f"SparseRows({self.values}, {self.indices}, {self.shape})"

    def tree_flatten(self) -> tuple[tuple[Any, Any], tuple[int, ...]]:
        """Returns both arrays, and the shape of a row."""
        return (self.values, self.indices), self.shape

    @classmethod
    def tree_unflatten(cls, shape: tuple[int, ...], arrays: Sequence[Any]) -> Any:
        """Returns a BCOO array, or `SparseRows` if the leaves are not JAX arrays."""
        values, indices = arrays
        if isinstance(values, jax.Array) and values.ndim == 2 and isinstance(indices, jax.Array):
            return _to_bcoo(values, indices, shape)
        return cls(values, indices, shape)


def _to_bcoo(values: jax.Array, indices: jax.Array, shape: tuple[int, ...]) -> Any:
    num_rows, width = values.shape
    row = jnp.broadcast_to(
        jnp.arange(num_rows, dtype=indices.dtype)[:, None, None], (num_rows, width, 1)
    )
    row = jnp.where(indices[..., :1] < shape[0], row, num_rows)  # Out of bounds on all axes.
    joined = jnp.concatenate([row, indices], axis=-1).reshape(num_rows * width, len(shape) + 1)
    return sparse.BCOO((values.reshape(-1), joined), shape=(num_rows, *shape))


def with_sparse_arrays(batch: object) -> Any:
    """Replaces the `SparseRows` of a host batch by BCOO arrays."""

    def joined(leaf: object) -> Any:
        if not isinstance(leaf, SparseRows):
            return leaf
        return _to_bcoo(jnp.asarray(leaf.values), jnp.asarray(leaf.indices), leaf.shape)

    return jax.tree.map(joined, batch, is_leaf=lambda leaf: isinstance(leaf, SparseRows))


def with_sparse_rows(parts: Sequence[Any]) -> list[Any]:
    """Replaces sparse arrays of SciPy, JAX or TensorFlow by equally wide `SparseRows`."""
    flat = [jax.tree.flatten(part, is_leaf=is_sparse) for part in parts]
    if not any(is_sparse(leaf) for leaves, _ in flat for leaf in leaves):
        return list(parts)
    columns = [
        _rows_of_sparse(column) if any(map(is_sparse, column)) else column
        for column in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    rows = zip(*columns, strict=True)
    return [
        jax.tree.unflatten(structure, leaves)
        for (_, structure), leaves in zip(flat, rows, strict=True)
    ]


def is_sparse(leaf: object) -> bool:
    """Returns True for a sparse array of JAX, SciPy or TensorFlow."""
    if type(leaf) is np.ndarray:  # most are
        return False
    if isinstance(leaf, sparse.BCOO | sparse.BCSR):
        return True
    kind = type(leaf)
    return kind.__module__.startswith("scipy.sparse") or kind.__name__ in _TENSORFLOW_TYPES


# Sparse values of tf.data, as tensors and as NumPy.
_TENSORFLOW_TYPES = ("SparseTensor", "SparseTensorValue")


def _rows_of_sparse(column: Sequence[Any]) -> list[Any]:
    entries = [_entries(leaf) for leaf in column]
    counts = [np.bincount(where[:, 0], minlength=1).max() for _, where, _ in entries]
    width = 1 << max(int(max(counts)) - 1, 0).bit_length()  # Powers of two: fewer programs.
    return [_to_rows(values, where, shape, width) for values, where, shape in entries]


def _entries(leaf: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """Returns the values, indices and shape of a sparse array on the host."""
    if isinstance(leaf, sparse.BCSR):
        leaf = leaf.to_bcoo()
    if isinstance(leaf, sparse.BCOO):
        leaf = sparse.bcoo_update_layout(leaf, n_batch=0, n_dense=0)
        values, where, shape = leaf.data, leaf.indices, leaf.shape
    elif type(leaf).__name__ in _TENSORFLOW_TYPES:
        values, where, shape = leaf.values, leaf.indices, leaf.dense_shape
    else:
        leaf = leaf.tocoo()
        values, where, shape = leaf.data, np.stack([leaf.row, leaf.col], axis=1), leaf.shape
    shape = tuple(int(size) for size in shape)
    values, where = np.asarray(values), np.asarray(where)
    is_entry = (where < np.asarray(shape)).all(axis=1)
    return values[is_entry], where[is_entry], shape


def _to_rows(
    values: np.ndarray, where: np.ndarray, shape: tuple[int, ...], width: int
) -> SparseRows:
    order = np.argsort(where[:, 0], kind="stable")
    values, where = values[order], where[order]
    row = where[:, 0]
    column = np.arange(len(row)) - np.searchsorted(row, row)
    row_values = np.zeros((shape[0], width), values.dtype)
    indices = np.broadcast_to(np.asarray(shape[1:], "int32"), (shape[0], width, len(shape) - 1))
    indices = indices.copy()  # Out of bounds: JAX's mark of padding.
    row_values[row, column] = values
    indices[row, column] = where[:, 1:]
    return SparseRows(row_values, indices, shape[1:])


_MAX_ROWS = 4  # In an error message.


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """This process's part of one batch on the host, and its split over replicas.

    Arrays have shape (rows, ...), where rows may be fewer than replicas * `size`: padding is added
    on transfer. `is_array` is False for None leaves of `structure`. `num_examples` counts true rows
    of this process's replicas. `size` is rows per replica with padding. `lengths` are true rows of
    this process's replicas, `all_lengths` of all processes'; None if all have `size`. Batches with
    equal `signature` (structure, shapes, dtypes) share a program. `origin` is the batch of all
    processes, if this is a part of one that all have read. `is_undivided` is True for such a batch
    itself, which is split where it is used.

    With one replica, arrays may differ in their rows, as labeled and unlabeled ones do. Then each
    has all of its own, and those of the first one are counted, as Keras does.
    """

    structure: Any
    arrays: list[Any]
    is_array: tuple[bool, ...]
    num_examples: int
    size: int
    lengths: tuple[int, ...] | None
    all_lengths: tuple[int, ...] | None
    signature: Any
    origin: HostBatch | None = None
    is_undivided: bool = False

    @property
    def is_uneven(self) -> bool:
        """True if arrays differ in their rows, so that these cannot be divided."""
        return len({array.shape[0] for array in self.arrays}) > 1

    def parts(self, num_replicas: int) -> list[Any]:
        """Returns a pytree of host arrays per replica, without padding."""
        if self.is_uneven:
            return [self._rebuild(self.arrays)]
        lengths = self.lengths or (self.size,) * num_replicas
        return [
            self._rebuild([array[i * self.size :][:length] for array in self.arrays])
            for i, length in enumerate(lengths)
        ]

    def whole(self) -> Any:
        """Returns the batch of all replicas as a pytree, including padding."""
        return with_sparse_arrays(self._rebuild(self.arrays))

    def rows(self, start: int, stop: int) -> Any:
        """Returns rows [start, stop) as a pytree."""
        if self.is_uneven:
            if (start, stop) != (0, self.num_examples):
                raise _uneven_error(self.arrays, "several processes")
            return self._rebuild(self.arrays)
        return self._rebuild([array[start:stop] for array in self.arrays])

    def of_replicas(self, first: int, count: int) -> HostBatch:
        """Returns the batch of replicas [first, first + count), with the same per-replica size."""
        lengths = self.lengths and self.lengths[first : first + count]
        if lengths is not None and set(lengths) == {self.size}:
            lengths = None
        start = first * self.size
        arrays = [array[start : start + count * self.size] for array in self.arrays]
        num_examples = count * self.size if lengths is None else sum(lengths)
        # The same number of rows may be a whole part or the start of a longer one.
        kind = _signature(self.structure, self.is_array, arrays)
        return dataclasses.replace(
            self,
            arrays=arrays,
            num_examples=num_examples,
            lengths=lengths,
            signature=(kind, self.size, self.all_lengths),
            origin=self,
        )

    def _rebuild(self, arrays: list[Any]) -> Any:
        return unflatten(self.structure, self.is_array, arrays)


def unflatten(structure: object, is_array: tuple[bool, ...], arrays: Sequence[Any]) -> Any:
    """Returns arrays as a pytree; leaves that are no arrays are None."""
    remaining = iter(arrays)
    leaves = [next(remaining) if present else None for present in is_array]
    return jax.tree.unflatten(structure, leaves)


def name_of_array(structure: object, is_array: tuple[bool, ...], place: int) -> str:
    """Returns the name of an array of a batch in messages: its path, as in Python."""
    present = [number for number, is_present in enumerate(is_array) if is_present]
    numbered = jax.tree.unflatten(structure, range(len(is_array)))
    path, _ = jax.tree_util.tree_flatten_with_path(numbered)[0][present[place]]
    return f"batch{jax.tree_util.keystr(path)}"


def take_batch(data: object, num_replicas: int) -> HostBatch:
    """Splits a batch from a data source over replicas.

    `data` is a pytree of arrays of shape (B, ...), sparse arrays, and None. Arrays on an
    accelerator stay there. Raises ValueError for unbatched arrays, different leading sizes under
    several replicas, or ragged rows.
    """
    leaves, structure = jax.tree.flatten(data, is_leaf=_is_none_or_sparse)
    if any(map(is_sparse, leaves)):
        (data,) = with_sparse_rows([data])
        leaves, structure = jax.tree.flatten(data, is_leaf=_is_none_or_sparse)
    arrays = [_array(leaf) for leaf in leaves if leaf is not None]
    for array in arrays:
        _check_rows(array)
    sizes = {array.shape[0] if array.ndim else None for array in arrays}
    if not sizes or None in sizes:
        raise invalid(
            f"A batch has arrays of shapes {[array.shape for array in arrays]}.",
            expected="batched arrays, all with the same leading size.",
            fix="batch the data: dataset.batch(n), or yield arrays with a leading batch axis. "
            "Convert lists of rows to arrays, with keras.utils.pad_sequences if their "
            "lengths differ.",
            code="SG301",
        )
    if len(sizes) > 1 and num_replicas > 1:
        raise _uneven_error(arrays, f"{num_replicas} replicas")
    num_examples = arrays[0].shape[0]
    size, lengths = split_lengths(num_examples, num_replicas)
    is_present = tuple(leaf is not None for leaf in leaves)
    signature = _signature(structure, is_present, arrays)
    return HostBatch(structure, arrays, is_present, num_examples, size, lengths, lengths, signature)


def _uneven_error(arrays: Sequence[Any], sharing: str) -> ValueError:
    return invalid(
        f"A batch has arrays of shapes {[array.shape for array in arrays]}, which {sharing} share.",
        expected="batched arrays, all with the same leading size: replicas share the rows of "
        "a batch, and losses and metrics count a row once for all arrays.",
        fix="batch the data: dataset.batch(n). Convert lists of rows to arrays, with "
        "keras.utils.pad_sequences if their lengths differ. Put several rows of a longer array "
        "beside each row of the others: reshape 24 rows to (8, 3, ...), and back in the model. "
        "Pass a constant outside of the batch. Or use sg.OneDeviceStrategy, which takes arrays "
        "of all sizes.",
        code="SG301",
    )


def _is_none_or_sparse(leaf: object) -> bool:
    return leaf is None or is_sparse(leaf)


def take_own_part(data: object, topology: Topology) -> HostBatch:
    """Returns this process's part of a batch that all processes read."""
    batch = take_batch(data, topology.num_replicas)
    if not topology.spans_processes or batch.is_uneven:
        return batch
    return batch.of_replicas(topology.local_replica_ids[0], topology.num_local_replicas)


def split_again(batch: HostBatch, topology: Topology) -> HostBatch:
    """Returns this process's part of a batch that all processes have read, for other processes."""
    whole = batch if batch.origin is None else batch.origin
    return take_own_part(whole.rows(0, whole.num_examples), topology)


def _signature(structure: object, is_array: tuple[bool, ...], arrays: Sequence[Any]) -> Any:
    return structure, is_array, tuple((array.shape, array.dtype) for array in arrays)


def _array(leaf: Any) -> Any:
    """Returns a host array; an array on an accelerator stays there."""
    if isinstance(leaf, DeviceRows) or is_on_accelerator(leaf):
        return leaf
    _check_ragged(leaf)
    return np.asarray(leaf)


def _check_ragged(leaf: object) -> None:
    """Raises ValueError for a tf.RaggedTensor and its form in tf.data."""
    splits = getattr(leaf, "row_splits", None)
    if splits is not None:
        lengths = np.diff(np.asarray(splits))
        raise _ragged_error(f"a {type(leaf).__name__}", [f"{length} values" for length in lengths])


def _check_rows(array: jax.Array | np.ndarray) -> None:
    """Raises ValueError for an object array with arrays as rows; strings are allowed."""
    if not isinstance(array, np.ndarray) or array.dtype != object:
        return
    if not array.ndim:
        _check_ragged(array.item())
        return
    rows = [row for row in array.flat if isinstance(row, list | tuple | np.ndarray | jax.Array)]
    if rows:
        shapes = [
            f"{len(row)} values" if isinstance(row, list | tuple) else f"shape {row.shape}"
            for row in rows
        ]
        raise _ragged_error("an array of objects", shapes)


def _ragged_error(kind: str, rows: list[str]) -> ValueError:
    more = f" and {len(rows) - _MAX_ROWS} more" if len(rows) > _MAX_ROWS else ""
    return invalid(
        f"A batch contains {kind} with rows of {', '.join(rows[:_MAX_ROWS])}{more}.",
        expected="arrays of numbers with rows of equal shape.",
        fix="pad the rows to one length with keras.utils.pad_sequences(rows, padding='post'), "
        "and pass the true lengths or a mask as another array.",
        code="SG302",
    )


def join_parts(
    parts: Sequence[Any],
    *,
    size: int | None = None,
    all_lengths: tuple[int, ...] | None = None,
) -> HostBatch:
    """Joins one pytree of arrays (n_i, ...) per replica into a batch; None has no examples.

    `size` is rows per replica with padding, by default the largest part. `all_lengths` are the rows
    of the replicas of all processes; None if this process has all. Raises ValueError if structures,
    dtypes or trailing shapes differ.
    """
    present = iter(with_sparse_rows([part for part in parts if part is not None]))
    batches = [None if part is None else take_batch(next(present), 1) for part in parts]
    first = next(batch for batch in batches if batch is not None)
    num_replicas = len(all_lengths or parts)
    if num_replicas == 1 and first.is_uneven:
        return first
    for batch in batches:
        if batch is not None and batch.is_uneven:
            raise _uneven_error(batch.arrays, f"{num_replicas} replicas")
    for batch in batches:
        if batch is not None:
            _check_same_kind(first, batch)
    counts = tuple(0 if batch is None else batch.num_examples for batch in batches)
    size = size or max(counts)
    arrays = [
        _concatenate(
            [padded((first if batch is None else batch).arrays[index], size) for batch in batches]
        )
        for index in range(len(first.arrays))
    ]
    lengths = None if set(counts) == {size} else counts
    all_lengths = all_lengths or counts
    if set(all_lengths) == {size}:
        all_lengths = None
    signature = (_signature(first.structure, first.is_array, arrays), all_lengths)
    return HostBatch(
        first.structure,
        arrays,
        first.is_array,
        sum(counts),
        size,
        lengths,
        all_lengths,
        signature,
    )


def _check_same_kind(first: HostBatch, other: HostBatch) -> None:
    if _describe(other) != _describe(first):
        raise invalid(
            f"Replicas received different batches: {_describe(first)} and {_describe(other)}.",
            expected="one structure and dtypes, and shapes that differ only in the batch axis.",
            fix="make dataset_fn return batches of the same structure for every replica.",
        )


def _describe(batch: HostBatch) -> str:
    descriptions = [f"{array.dtype}{['n', *array.shape[1:]]}" for array in batch.arrays]
    return str(unflatten(batch.structure, batch.is_array, descriptions))


def _concatenate(arrays: list[Any]) -> Any:
    if len(arrays) == 1:
        return arrays[0]
    if any(isinstance(array, jax.Array) for array in arrays):
        return jnp.concatenate(arrays)
    return np.concatenate(arrays)


def padded(array: jax.Array | np.ndarray, num_rows: int) -> Any:
    """Repeats the last example up to a number of rows; unlike zeros, it cannot overflow."""
    if array.shape[0] == num_rows:
        return array  # Slicing an array on a device is a program.
    if array.shape[0] > num_rows:
        return array[:num_rows]
    xp = jnp if isinstance(array, jax.Array) else np
    row = array[-1:] if array.shape[0] else xp.zeros((1, *array.shape[1:]), array.dtype)
    return xp.concatenate([array, xp.repeat(row, num_rows - array.shape[0], axis=0)])

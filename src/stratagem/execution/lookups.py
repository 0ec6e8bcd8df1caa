"""`sg.nn.embedding_lookup`, and gradients of tables as rows.

A table's gradient is zero outside the rows that were looked up, but JAX returns it dense. Each
lookup therefore gets a placeholder input for its rows, and the rows' gradient is the one with
respect to the placeholder.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.extend.core import Jaxpr, get_opaque_trace_state
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.devices.shards import require_exact_integers
from stratagem.errors import explain, invalid
from stratagem.execution.jaxprs import free_variables, is_by_element, retrace
from stratagem.execution.replica_context import get_replica_context
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.execution.tracing.remote_state import Ids, Lookup
from stratagem.variables.distributed import IndexedSlices
from stratagem.variables.layouts import is_keyed, store_of
from stratagem.variables.sharded_variable import ShardedVariable, shards_of

# Measured on two CPU devices: below 64 Ki elements rows gain nothing. If all replicas together look
# up half as many rows as the table has, both ways take the same time.
_MIN_TABLE_SIZE = 65_536
_TABLE = "_stratagem_is_table"


def note_table(variable: keras.Variable) -> None:
    """Marks a variable whose rows are looked up, so that its gradient may be rows, too."""
    setattr(variable, _TABLE, True)


def is_table(variable: keras.Variable) -> bool:
    """Returns True if rows of a variable were ever looked up."""
    return getattr(variable, _TABLE, False)


def tables_among(variables: Sequence[Any]) -> list[Any]:
    """Returns the variables whose rows were ever looked up."""
    return [variable for variable in variables if is_table(variable)]


def embedding_lookup(params: Any, ids: object) -> jax.Array:
    """Returns rows of a table; its gradient can stay as rows. Call anywhere.

    If `sg.value_and_grad` differentiates by the table and the table is only looked up, the gradient
    is stored as rows, and replicas exchange these instead of the whole table.

    Args:
        params: the table: a Keras variable of shape (n, ...); an `sg.ShardedVariable`, each shard
            of which is a table; an array, which is indexed as usual; or the keyed table of an
            `sg.embedding.DynamicEmbedding`.
        ids: integers of any shape, -n <= id < n; others return rows of NaN. For a keyed table,
            the result of `sg.embedding.keys`.

    Returns:
        Array of shape (*ids.shape, ...), in the table's compute dtype. A keyed table has one row
        for each pair of numbers on the last axis of `ids`.

    Raises:
        OverflowError: 64-bit ids that JAX would change.
        TypeError: `ids` are not integers, or not keys.
        ValueError: `params` is a scalar; or keys are looked up inside `lax.scan` or the like.

    Example:
        >>> table = sg.Variable([[1.0, 2.0], [3.0, 4.0]])
        >>> sg.nn.embedding_lookup(table, [1, 1])
        Array([[3., 4.],
               [3., 4.]], dtype=float32)

    Source: TF 2.21 embedding_ops.py, embedding_lookup.
    """
    require_exact_integers([ids], lambda _: "An array of ids")
    ids = jnp.asarray(ids)
    _check_lookup(params, ids)
    if not isinstance(params, keras.Variable):
        if isinstance(params, ShardedVariable):
            return _rows_of_shards(params, ids)
        return jnp.take(jnp.asarray(params), ids, axis=0)
    note_table(params)
    lookups = _current.lookups
    if lookups is not None:
        return lookups.look_up(params, ids)
    if is_elsewhere(params) and (scope := current_scope()) and scope.is_at_its_own_level:
        return _rows_from_elsewhere(params, ids, scope)
    return _plain_rows(params, ids)


def _check_lookup(params: Any, ids: jax.Array) -> None:
    if is_keyed(params) and (ids.dtype != np.uint32 or ids.shape[-1:] != (2,)):
        raise TypeError(
            explain(
                f"The keyed table {params.path!r} received ids of dtype {ids.dtype} and shape "
                f"{ids.shape}.",
                expected="keys of dtype uint32 and shape (..., 2), because JAX has no 64-bit "
                "integers.",
                fix="convert ids or strings in the dataset: sg.embedding.keys(ids).",
            )
        )
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(
            explain(
                f"embedding_lookup received ids of dtype {ids.dtype}.",
                expected="integers.",
                fix='cast them: keras.ops.cast(ids, "int32").',
            )
        )
    if not jnp.ndim(params):
        raise invalid(
            "embedding_lookup received a scalar instead of a table.",
            expected="a table with rows on axis 0.",
            fix="pass a variable of shape (n, ...).",
        )


def is_recorded(table: keras.Variable) -> bool:
    """Returns True if a lookup in this variable does more than read it."""
    if _current.lookups is None:
        return is_elsewhere(table)
    return _current.lookups.counts(table)


def is_elsewhere(table: Any) -> bool:
    """Returns True if a step looks up single rows of an offloaded or remote variable."""
    if not getattr(table, "has_rows", False):
        return False
    if (scope := current_scope()) is None:
        return True
    return id(table) not in scope.outermost.whole_tables and not scope.has_written(table)


def is_worth_rows(shape: Sequence[int]) -> bool:
    """Returns True for tables large enough that sending rows is faster than the whole table."""
    return len(shape) > 1 and math.prod(shape) >= _MIN_TABLE_SIZE


def _rows_from_elsewhere(table: keras.Variable, ids: jax.Array, scope: ReplicaScope) -> jax.Array:
    shape = _shape_of_rows(table, ids)
    if scope.receive is None or id(table) in scope.writes or not exchanges_rows(table, [shape]):
        return _plain_rows(table, ids)
    lookup = Lookup(table, shape, jnp.dtype(table.dtype))
    place, received = scope.receive(lookup)
    scope.send(Ids(place), as_row_numbers(ids))
    rows, _ = _rows_and_places(table, ids, received)
    return rows.astype(table.value.dtype)  # mixed precision computes in another dtype


def _shape_of_rows(table: keras.Variable, ids: jax.Array) -> tuple[int, ...]:
    return (*(ids.shape[:-1] if is_keyed(table) else ids.shape), *table.shape[1:])


def _rows_and_places(table: keras.Variable, ids: jax.Array, received: Any) -> tuple[Any, Any]:
    """Returns received rows, and the indices of their gradient: places of keys, or the ids."""
    return received if is_keyed(table) else (received, ids)


def as_row_numbers(ids: jax.Array) -> jax.Array:
    """Returns ids in a dtype that can hold every row number."""
    return ids.astype(jnp.int32) if ids.dtype.itemsize < 4 else ids


def _plain_rows(table: keras.Variable, ids: jax.Array) -> jax.Array:
    if is_keyed(table):
        return table.rows_outside(ids)
    is_outside = not isinstance(ids, Tracer) and current_scope() is None
    if is_outside and hasattr(table, "take_rows"):
        return _taken_rows(table, np.asarray(ids))
    if is_outside and is_elsewhere(table):
        return table.rows_outside(ids)
    return jnp.take(jnp.asarray(table.value), ids, axis=0)


def _taken_rows(table: keras.Variable, ids: np.ndarray) -> jax.Array:
    """Fetches each distinct row once from a table that returns single rows."""
    num_rows = table.shape[0]
    numbers = np.where(ids < 0, ids.astype(np.int64) + num_rows, ids)
    unique, places = np.unique(numbers, return_inverse=True)
    is_row = (unique >= 0) & (unique < num_rows)
    rows = jnp.asarray(table.take_rows(unique[is_row]))
    if not len(rows):
        rows = jnp.zeros((1, *rows.shape[1:]), rows.dtype)
    # An index past the end makes JAX fill the row, as it does with a whole table.
    places = np.where(is_row, np.cumsum(is_row) - 1, len(rows))[places]
    return jnp.take(rows, jnp.asarray(places.reshape(ids.shape)), axis=0)


def _rows_of_shards(table: ShardedVariable, ids: jax.Array) -> jax.Array:
    """Looks rows up in each shard, so that the gradient of each may be rows."""
    num_rows = table.shape[0]
    nowhere = jnp.where((ids >= -num_rows) & (ids < num_rows), 0, 1)
    # Zeros, except NaN (JAX's fill value) for ids out of range.
    rows = jnp.take(jnp.zeros((1, *table.shape[1:]), table.dtype), nowhere, axis=0)
    for shard, (own_ids, are_own) in shards_of(table, ids):
        # Servers accept no id past the end, so other shards' ids read row 0 there.
        other = 0 if is_elsewhere(shard) else shard.shape[0]
        found = embedding_lookup(shard, jnp.where(are_own, own_ids, other))
        several = (*jnp.shape(are_own), *[1] * (len(table.shape) - 1))
        rows = jnp.where(jnp.reshape(are_own, several), found, rows)
    return rows


class _CurrentLookups(threading.local):
    lookups: Lookups | None = None


_current = _CurrentLookups()


class Lookups:
    """Lookups in `tables` during one function call, in order; other lookups are ordinary reads."""

    def __init__(
        self,
        tables: Sequence[Any],
        stand_ins: dict[int, list[jax.Array]] | None = None,  # placeholders; None only counts
        received: dict[int, list[Any]] | None = None,  # rows of remote or offloaded tables
    ) -> None:
        self._tables = {id(table) for table in tables}
        self._received = {key: list(rows) for key, rows in (received or {}).items()}
        self.tables_elsewhere: dict[int, Any] = {}
        self._stand_ins = (
            None if stand_ins is None else {key: list(rows) for key, rows in stand_ins.items()}
        )
        self._has_missed = False
        self.ids: dict[int, list[jax.Array]] = {}
        self.places: dict[int, list[Any]] = {}  # of gradients: ids, or places of keys
        self.shapes: dict[int, list[tuple[int, ...]]] = {}
        self._trace: Any = None
        self._outer: Lookups | None = None

    def __enter__(self) -> Lookups:
        self._trace = get_opaque_trace_state(convention="nnx")
        self._outer, _current.lookups = _current.lookups, self
        return self

    def __exit__(self, *_: object) -> None:
        _current.lookups = self._outer

    @property
    def are_matched(self) -> bool:
        """Returns True if placeholders and lookups match one to one."""
        return not self._has_missed and not any((self._stand_ins or {}).values())

    def counts(self, table: keras.Variable) -> bool:
        """Returns True if the lookups of a table are recorded here."""
        # Values inside lax.scan or jax.checkpoint cannot leave it: such a lookup is a plain read.
        is_nested = self._trace != get_opaque_trace_state(convention="nnx")
        scope = current_scope()
        if scope is None or is_nested or id(table) in scope.writes:  # rows of a new value
            return False
        if self._stand_ins is None and is_elsewhere(table):
            self.tables_elsewhere[id(table)] = table
            return True
        return id(table) in self._tables

    def look_up(self, table: keras.Variable, ids: jax.Array) -> jax.Array:
        """Returns rows of a table, connected to their placeholder for differentiation."""
        scope = current_scope()
        if scope is None or not self.counts(table):
            return _plain_rows(table, ids)
        was_read = id(table) in scope.read_ids
        value = jnp.asarray(table.value)
        shape = _shape_of_rows(table, ids)
        stand_in = None
        if self._stand_ins is not None:
            remaining = self._stand_ins[id(table)]
            if not remaining or remaining[0].shape != shape:
                self._has_missed = True
                return _plain_rows(table, ids)
            stand_in = remaining.pop(0)
        if not was_read:
            scope.read_ids.discard(id(table))
        self.ids.setdefault(id(table), []).append(ids)
        self.shapes.setdefault(id(table), []).append(shape)
        if received := self._received.get(id(table)):
            rows, places = _rows_and_places(table, ids, received.pop(0))
        elif not is_keyed(table):
            rows, places = jnp.take(value, ids, axis=0), ids
        elif self._stand_ins is None:
            rows, places = jnp.zeros(shape, value.dtype), None  # this call only counts
        else:
            rows, places = table.looked_up(ids)
        self.places.setdefault(id(table), []).append(places)
        rows = rows.astype(value.dtype)
        return rows if stand_in is None else _attach(rows, stand_in)


@jax.custom_jvp
def _attach(rows: jax.Array, stand_in: jax.Array) -> jax.Array:
    """Returns the rows; the derivative is that of the placeholder alone."""
    return rows


@_attach.defjvp
def _attach_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    return primals[0], tangents[1].astype(primals[0].dtype)


def slices_of(
    table: keras.Variable, places: Sequence[jax.Array], rows: Sequence[jax.Array]
) -> IndexedSlices:
    """Joins the gradients of a table's lookups into `IndexedSlices`, in lookup order."""
    row_shape = tuple(table.shape[1:])
    indices = [one.reshape(-1).astype(jnp.int32) for one in places]
    values = [one.reshape(-1, *row_shape) for one in rows]
    return IndexedSlices(jnp.concatenate(values), jnp.concatenate(indices), tuple(table.shape))


def rows_pay(table: keras.Variable, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns True if replicas exchange less data as rows than as the whole table.

    `shapes` are those of the rows of each lookup on one replica.
    """
    return math.prod(table.shape) > _MIN_TABLE_SIZE and _are_few(table, shapes)


def _are_few(table: keras.Variable, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns True if all replicas together look up fewer rows than half of the table."""
    num_elements = sum(math.prod(shape) for shape in shapes)
    return 2 * num_elements * _num_replicas() < math.prod(table.shape)


def exchanges_rows(table: keras.Variable, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Returns True if lookups in a table that `is_elsewhere` get single rows.

    A table that is sharded over the replicas is gathered whole if that is less data and memory.
    """
    store = store_of(table)
    is_sharded = store is not None and store.is_on_replicas
    return not is_sharded or _are_few(table, shapes)


def has_company() -> bool:
    """Returns True if there are several replicas."""
    return _num_replicas() > 1


def _num_replicas() -> int:
    context = get_replica_context()
    return 1 if context is None else context.num_replicas_in_sync


# Row-by-row updates of sharded tables: each device updates the rows of its own shard.
#
# The trace marks where an update reads rows and where it writes them back. If everything in between
# is computed element by element, each device can do it for its own rows, and no rows are sent.


# Jitted, so that the trace records them by name.
@jax.jit
def _stratagem_rows_to_update(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="clip")


@jax.jit
def _stratagem_with_updated_rows(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[ids].set(rows, mode="drop", unique_indices=True)


def rows_to_update(table: object, ids: jax.Array) -> jax.Array:
    """Returns the rows of a table, of shape (n, ...), that `with_updated_rows` writes back.

    `ids` are unique. An id of n or more stands for no row and returns an arbitrary one.
    """
    return _stratagem_rows_to_update(table, ids)


def with_updated_rows(table: object, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a table with the rows at `ids` replaced; see `rows_to_update`."""
    return _stratagem_with_updated_rows(table, ids, rows)


_READS, _WRITES = "_stratagem_rows_to_update", "_stratagem_with_updated_rows"


@dataclasses.dataclass(frozen=True)
class ShardedRowUpdates:
    """An update split in two: `rest` runs first, then each device runs `own` on its shards."""

    rest: Jaxpr  # outputs: those of the update that are not `is_own`, then values for `own`
    own: Jaxpr  # inputs: tables, then values from `rest`; outputs: the new tables
    tables: list[int]  # indices of the tables among the update's inputs
    is_own: list[bool]  # for each output of the update, True if `own` computes it
    topology: Topology

    @classmethod
    def of(cls, update: Jaxpr, are_parts: Sequence[bool], topology: Topology) -> ShardedRowUpdates:
        """Splits an update; `are_parts` marks inputs that are sharded along axis 0."""
        places = {id(one): place for place, one in enumerate(update.invars) if are_parts[place]}
        own = _updates_of_rows(update, places)
        made = {id(variable) for eqn in own for variable in eqn.outvars}
        is_own = [id(atom) in made for atom in update.outvars]
        needed = free_variables(own)
        tables = [places[id(atom)] for atom in needed if id(atom) in places]
        others = [atom for atom in needed if id(atom) not in places]
        outputs = list(zip(update.outvars, is_own, strict=True))
        of_own = {id(eqn) for eqn in own}
        return cls(
            rest=update.replace(
                eqns=[eqn for eqn in update.eqns if id(eqn) not in of_own],
                outvars=[*(atom for atom, own in outputs if not own), *others],
            ),
            own=update.replace(
                eqns=own,
                invars=[*(update.invars[place] for place in tables), *others],
                outvars=[atom for atom, own in outputs if own],
            ),
            tables=tables,
            is_own=is_own,
            topology=topology,
        )

    def values(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of the update for its inputs."""
        outputs = retrace(self.rest, inputs)
        if not self.own.eqns:
            return outputs
        end = len(outputs) - (len(self.own.invars) - len(self.tables))
        parted, copied = PartitionSpec(self.topology.shard_axis), PartitionSpec()
        run = jax.shard_map(
            lambda *values: retrace(self.own, values, _of_one_device(self.topology.shard_axis)),
            mesh=self.topology.mesh,
            in_specs=(*[parted] * len(self.tables), *[copied] * (len(outputs) - end)),
            out_specs=[parted] * sum(self.is_own),
            axis_names={*self.topology.replica_axes},
            check_vma=False,
        )
        made = iter(run(*[inputs[place] for place in self.tables], *outputs[end:]))
        others = iter(outputs[:end])
        return [next(made if own else others) for own in self.is_own]


def _updates_of_rows(update: Jaxpr, tables: Container[int]) -> list[Any]:
    """Returns the operations from reading rows to writing them; none if others take part."""
    own: list[Any] = []
    rows: set[int] = set()
    new_tables: set[int] = set()
    read: set[int] = set()
    for eqn in update.eqns:
        name = eqn.params.get("name")
        is_of_table = name in (_READS, _WRITES) and id(eqn.invars[0]) in tables
        read.update(id(atom) for atom in eqn.invars)
        if is_of_table and name == _READS:
            rows.update(map(id, eqn.outvars))
        elif not any(id(atom) in rows for atom in eqn.invars):
            continue
        elif is_of_table and id(eqn.invars[1]) not in rows:
            new_tables.update(map(id, eqn.outvars))
        elif is_by_element(eqn):
            rows.update(map(id, eqn.outvars))
        else:
            return []
        own.append(eqn)
    leaves_rows = any(id(atom) in rows for atom in update.outvars)
    return [] if leaves_rows or new_tables & read else own


def _own_rows(axis: str, part: jax.Array, ids: jax.Array) -> list[jax.Array]:
    """Returns this device's rows, and arbitrary ones in the place of other devices' rows."""
    return [jnp.take(part, _own_ids(axis, part, ids), axis=0, mode="clip")]


def _with_own_rows(axis: str, part: jax.Array, ids: jax.Array, rows: jax.Array) -> list[jax.Array]:
    own = _own_ids(axis, part, ids)
    return [part.at[own].set(rows, mode="drop", unique_indices=True)]


def _own_ids(axis: str, part: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns row numbers within this device's shard; the shard's length for other rows."""
    own = ids - (jax.lax.axis_index(axis) * len(part)).astype(ids.dtype)
    return jnp.where((own >= 0) & (own < len(part)), own, len(part))


def _of_one_device(axis: str) -> Mapping[str, Callable[..., list[jax.Array]]]:
    return {_READS: partial(_own_rows, axis), _WRITES: partial(_with_own_rows, axis)}

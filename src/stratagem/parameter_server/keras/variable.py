"""Keras variables on parameter servers.

On the coordinator each read asks the servers; in a step it returns the value fetched before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer
from jax.extend import random as jax_random
from jax.typing import DTypeLike
from numpy.typing import ArrayLike

from stratagem.contexts import get_strategy
from stratagem.errors import explain, invalid
from stratagem.execution.lookups import embedding_lookup, is_worth_rows
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.private import (
    autocasts,
    compute_fans,
    get_stateless_scope,
    in_symbolic_scope,
    set_path,
)
from stratagem.keras.variables.requests import (
    check_explicit_device,
    current_annotations,
    is_initialized,
)
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.client.variable_client import (
    Stored,
    Unplaced,
    VariableClient,
    name_of,
)
from stratagem.variables.components import WholeValue
from stratagem.variables.distributed import IndexedSlices
from stratagem.variables.registry import Home, VariableKind
from stratagem.variables.sharded_variable import Rows, ShardedVariable, as_slice, changed_rows

# Rows of a large variable's initial value, made without the rest of it.
#
# JAX's generator makes each random number from the key and its place alone. A generator of our own,
# which JAX and Keras use like any other, begins at the place of the first row that is wanted.


_BITS = 2**32


class InitialRows:
    """Makes rows of what an initializer makes of a whole variable.

    Args:
        initializer: of Keras; its random numbers are drawn from JAX's default generator.
        shape: of the whole variable.
        dtype: its dtype.

    Raises:
        NotImplementedError: an initializer that needs the whole variable at once.

    Example:
        >>> from stratagem.parameter_server.keras.variable import InitialRows
        >>> rows = InitialRows(keras.initializers.RandomUniform(seed=1), (10**9, 4), "float32")
        >>> rows(500_000_000, 2).shape
        (2, 4)
    """

    def __init__(self, initializer: Callable[..., Any], shape: tuple[int, ...], dtype: str) -> None:
        self._shape = tuple(shape)
        self._dtype = dtype
        self._draw, self._seed = _drawn(initializer, self._shape)

    def __call__(self, first_row: int, num_rows: int) -> np.ndarray:
        """Returns rows.

        Args:
            first_row: the first.
            num_rows: how many.

        Returns:
            Array of shape (num_rows, ...).
        """
        shape = (num_rows, *self._shape[1:])
        if self._seed is None:
            return np.asarray(self._draw(shape, dtype=self._dtype))
        first = first_row * math.prod(self._shape[1:])
        place = [first // _BITS, first % _BITS]
        data = jnp.asarray([*self._seed, *place], "uint32")
        key = jax.random.wrap_key_data(data, impl=_rows_generator())
        return np.asarray(self._draw(shape, dtype=self._dtype, seed=key))


def _drawn(
    initializer: Callable[..., Any], shape: tuple[int, ...]
) -> tuple[Any, tuple[int, int] | None]:
    """Returns the function that draws any rows of an initializer, and its key."""
    initializers = keras.initializers
    kind, own = type(initializer), cast("Any", initializer)  # what it has depends on its class
    if kind in (initializers.Zeros, initializers.Ones) or (
        kind is initializers.Constant and np.ndim(own.value) == 0
    ):
        return initializer, None
    if kind is initializers.RandomUniform:
        limits = {"minval": own.minval, "maxval": own.maxval}
        return functools.partial(keras.random.uniform, **limits), _key(own)
    if kind in (initializers.RandomNormal, initializers.TruncatedNormal):
        moments = {"mean": own.mean, "stddev": own.stddev}
        is_cut = kind is initializers.TruncatedNormal
        draw = keras.random.truncated_normal if is_cut else keras.random.normal
        return functools.partial(draw, **moments), _key(own)
    if isinstance(initializer, initializers.VarianceScaling):
        return _scaled(initializer, shape), _key(initializer)
    raise NotImplementedError(
        explain(
            f"{kind.__name__} makes the initial value of a variable of shape {shape}, which is "
            "made in parts.",
            expected="zeros, ones, a constant, or random uniform or normal numbers, scaled or not.",
            fix="use such an initializer, or leave the variable in one piece: variable_partitioner "
            "says which are split.",
        )
    )


def _scaled(initializer: keras.initializers.VarianceScaling, shape: tuple[int, ...]) -> Any:
    """As `VarianceScaling.__call__` of Keras, with the fans of the whole variable."""
    fan_in, fan_out = compute_fans(shape, initializer)
    fan = {"fan_in": fan_in, "fan_out": fan_out}.get(initializer.mode, (fan_in + fan_out) / 2.0)
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "uniform":
        limit = math.sqrt(3.0 * variance)
        return functools.partial(keras.random.uniform, minval=-limit, maxval=limit)
    if initializer.distribution == "untruncated_normal":
        return functools.partial(keras.random.normal, mean=0.0, stddev=math.sqrt(variance))
    # The standard deviation of normal numbers that are cut at two of theirs.
    stddev = math.sqrt(variance) / 0.87962566103423978
    return functools.partial(keras.random.truncated_normal, mean=0.0, stddev=stddev)


def _key(initializer: Any) -> tuple[int, int]:
    """The key that Keras would draw from: of a number, or the next one of a generator."""
    seed = initializer.seed
    if isinstance(seed, keras.random.SeedGenerator):
        first, second = np.asarray(seed.next()).tolist()
        return first, second
    return int(seed) % _BITS, 0


@functools.cache
def _rows_generator() -> Any:
    """JAX's default generator, with the place of the first number in its key."""
    return jax_random.define_prng_impl(
        key_shape=(4,),
        seed=_unused,
        split=_unused,
        fold_in=_unused,
        random_bits=_bits_of_places,
        name="stratagem_rows",
        tag="rows",
    )


def _bits_of_places(data: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    """The bits that JAX's generator makes of the places from the first one on."""
    key, high, low = data[:2], data[2], data[3]
    size = math.prod(shape)
    lows = low + jax.lax.iota("uint32", size)
    highs = high + (lows < low).astype("uint32")
    made = jax_random.threefry_2x32(key, jnp.concatenate([highs, lows]))
    first, second = made[:size], made[size:]
    if bit_width == 64:
        dtype = jnp.dtype("uint64")
        bits = (first.astype(dtype) << 32) | second.astype(dtype)
    else:
        bits = (first ^ second).astype(f"uint{bit_width}")
    return bits.reshape(shape)


def _unused(*_: object) -> Any:
    raise NotImplementedError("a random initial value was to be drawn from a derived key")


# A larger initial value is created row by row, on its server.
_MAX_LOCAL_BYTES = 64 * 2**20
# Row updates that servers implement.
_SIGNS = {"scatter_add": 1, "scatter_sub": -1, "scatter_update": 0}


class _Next(threading.local):
    """Options of the variable that is created next."""

    slot: str | Callable[[], str] | None = None
    kind: type[ParameterServerVariable] | None = None


_next: _Next = _Next()


@contextlib.contextmanager
def making_slot(
    name: str | Callable[[], str], kind: type[ParameterServerVariable] | None = None
) -> Generator[None]:
    """Makes the variable created in a `with` block one that the servers have under a name.

    `name` may be a function that returns it when the variable is initialized; `kind` is its class.
    """
    previous = _next.slot, _next.kind
    _next.slot, _next.kind = name, kind or ParameterServerVariable
    try:
        yield
    finally:
        _next.slot, _next.kind = previous


def class_of_slot() -> type[ParameterServerVariable] | None:
    """Returns the class that the surrounding `making_slot` chooses; None outside."""
    return _next.kind


def _has_axes(initializer: object, shape: Sequence[int] | None) -> bool:
    """Returns True unless a variable will be a scalar."""
    if shape is not None or callable(initializer) or isinstance(initializer, str):
        return shape is None or bool(np.size(shape))
    return bool(np.ndim(cast("ArrayLike", initializer)))


class ParameterServerVariable(DistributedVariable):
    """A remote Keras variable: all of a `ParameterServerStrategy` and some of others.

    Created by `keras.Variable`, with its arguments.

    Raises:
        NotImplementedError: it has a constraint and is split or trained by rows.
    """

    is_remote = True
    place: Any = None  # None until it has a value; see `variable_client`
    held: Any = None  # its value during a step here: one copy, or a component per replica
    _slot: str | Callable[[], str] | None = None
    _give: Callable[[], None] | None = None

    def __init__(
        self,
        initializer: object,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        trainable: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if is_initialized(self):
            return
        # In a step Keras requests the initial value later.
        self._slot = _next.slot
        if self._slot is None and (trainable or _has_axes(initializer, shape)):
            # Checked here: Keras retries variables noted as uninitialized in each later step.
            get_strategy().placement.remote.variables.require_coordinator(
                kwargs.get("name") or "variable"
            )
        super().__init__(initializer, shape, dtype, trainable, *args, **kwargs)

    @property
    def variable_client(self) -> VariableClient:
        """Client of the servers."""
        return self._home.strategy.placement.remote.variables

    @property
    def is_slot(self) -> bool:
        """True if it is an optimizer's slot of another variable."""
        return self._slot is not None

    @property
    def is_added_to(self) -> bool:
        """True if a step writes differences, as for averages that all workers update."""
        return self._synchronization == "on_read"

    @property
    def has_value(self) -> bool:
        """True if it is initialized."""
        return self.place is not None

    @property
    def storage(self) -> Any:
        """The fetched value in a step, elsewhere the current value on the servers."""
        if self.held is not None and self.variable_client.is_in_step:
            return self.held
        return self._asked().read(self)

    @storage.setter
    def storage(self, value: object) -> None:
        if value is None:
            return
        if self.variable_client.is_in_step:
            self.held = value
        else:
            self._asked().assign(self, value)

    @property
    def _value(self) -> Any:
        """The value; Keras checks it for None."""
        return None if self.place is None else self.storage

    @_value.setter
    def _value(self, value: object) -> None:
        self.storage = value

    def _global_value(self) -> Any:
        self._require_own_replica()
        if self.place is None:
            return self._initializer(self._shape, dtype=self._dtype)
        if in_symbolic_scope():  # traced: only the shape matters
            return jnp.zeros(self._shape, self._dtype)
        value = self.storage
        if isinstance(value, Tracer):
            return value
        if self._home.kind is VariableKind.ON_READ and self.variable_client.is_in_step:
            return jnp.asarray(np.asarray(value).mean(0), self._dtype)
        return jnp.asarray(value, self._dtype)

    def asks_all_processes(self) -> bool:
        """Returns False: no read needs a program that all processes run."""
        return False

    def _direct_assign(self, value: object) -> None:
        self._require_own_replica()
        self._asked().assign(self, value)

    def _initialize_with_initializer(self, initializer: Callable[..., Any]) -> None:
        shape: Any = self._shape
        if self._slot is not None:
            self.place = Stored(self._slot() if callable(self._slot) else self._slot)
            return
        check_explicit_device(self.path, self._home)
        num_bytes = math.prod(shape) * np.dtype(jnp.dtype(self._dtype)).itemsize
        self.has_rows = self._is_table and is_worth_rows(shape)
        if num_bytes > _MAX_LOCAL_BYTES:
            with contextlib.suppress(NotImplementedError):  # no rows alone: create it whole
                self.variable_client.create(self, InitialRows(initializer, shape, self._dtype))
                self.find_shards()
                return
        self._place_initial(
            np.asarray(self._convert_to_tensor(initializer(shape, dtype=self._dtype)))
        )

    def _place_initial(self, value: np.ndarray) -> None:
        self.has_rows = self._is_table and is_worth_rows(self.shape)
        # A counter or a learning rate may belong to an optimizer, which the servers get later.
        if not self.shape and not self.trainable:
            self.place = Unplaced(value)
        else:
            self.variable_client.create(self, value)
            self.find_shards()

    def settle(self, home: Home, value: jax.Array | np.ndarray) -> None:
        """Moves a variable that joins the strategy to the servers, with its value."""
        self._home = home
        self.whole = WholeValue()
        home.strategy.variables.add(self, home)
        self._place_initial(np.asarray(value))

    def find_shards(self) -> None:
        """Changes the class to a `ShardedVariable` if it is split over servers."""

    def made_for(self, give: Callable[[], None]) -> None:
        """Registers a function, called once, that gives servers this slot's optimizer."""
        self._give = give

    def _asked(self) -> VariableClient:
        """Returns the client; before the first use, gives the servers this slot's optimizer."""
        if self._give is not None:
            give, self._give = self._give, None
            give()
        return self.variable_client

    @property
    def is_apart(self) -> bool:
        """True if reads and writes here go to the servers at once."""
        in_scope = current_scope() is not None or get_stateless_scope() is not None
        is_stored = isinstance(self.place, Stored) and bool(self.shape)
        is_elsewhere = is_stored and not in_symbolic_scope() and not in_scope
        return is_elsewhere and not self.variable_client.is_in_step

    def take_rows(self, rows: Rows) -> Any:
        """Returns some rows; see `ShardedVariable.take_rows`."""
        if self.is_apart:
            self._require_own_replica()
            ids = np.asarray(rows, np.int64)
            return self._maybe_autocast(self._asked().client.pull_rows(name_of(self), ids))
        if self.has_rows and current_scope() is not None:
            return embedding_lookup(self, np.asarray(rows, np.int64))
        return self.value[as_slice(rows) if isinstance(rows, range) else rows]

    def change_rows(self, method: str, slices: IndexedSlices) -> Any:
        """Changes rows without aggregation; outside of steps only these rows are sent."""
        if not self.is_apart:
            return super().change_rows(method, slices)
        self._require_own_replica()
        variable_client, num_rows = self._asked(), self.shape[0]
        ids = np.asarray(slices.indices).astype(np.int64)
        ids = np.where(ids < 0, ids + num_rows, ids)
        is_row = (ids >= 0) & (ids < num_rows)  # no row past the end
        ids, values = ids[is_row], np.asarray(slices.values)[is_row].astype(jnp.dtype(self._dtype))
        if method in _SIGNS:
            variable_client.scatter(self, ids, values, sign=_SIGNS[method])
        else:
            rows, places = np.unique(ids, return_inverse=True)
            now = variable_client.client.pull_rows(name_of(self), rows)
            changed = changed_rows(method, now, IndexedSlices(values, places))
            variable_client.scatter(self, rows, np.asarray(changed))
        return self._changed()

    def _changed(self) -> Any:
        """Returns the result of a change outside of steps."""
        return self.value

    def hold(self, value: np.ndarray) -> None:
        """Stores a value for a step of this process."""
        if self._home.kind is VariableKind.ON_READ:
            value = np.broadcast_to(value, (self._home.strategy.num_replicas_in_sync, *value.shape))
        self.held = value

    def whole_held(self) -> np.ndarray:
        """Returns the value written by a step, averaged over components."""
        value = np.asarray(self.held)
        return value.mean(0) if self._home.kind is VariableKind.ON_READ else value

    def _assign_delta(self, value: object, *, sign: int) -> Any:
        scope = current_scope()
        if scope is None and get_stateless_scope() is None:
            self._asked().assign(self, self._contribution(value), sign=sign)
            return self._changed()
        if scope is None:  # Keras infers shapes
            return super()._assign_delta(value, sign=sign)
        added_to = scope.outermost.added_to
        was_set = scope.has_written(self) and id(self) not in added_to
        result = super()._assign_delta(value, sign=sign)
        if not was_set:
            added_to.add(id(self))
        return result

    def assign(self, value: object) -> Any:
        """Sets the value; in a replica function by the variable's aggregation."""
        if (scope := current_scope()) is not None:
            scope.outermost.added_to.discard(id(self))
        return super().assign(value)

    @property
    def constraint(self) -> Any:
        """Constraint that the servers apply after each update of the variable; None without one."""
        return self._constraint

    @constraint.setter
    def constraint(self, value: Any) -> None:
        self._constraint = value
        self.check_constraint()

    def check_constraint(self) -> None:
        """Raises a NotImplementedError if no server has the whole value that a constraint needs."""
        is_split = isinstance(self, ShardedVariable)
        why = "parameter servers have its shards" if is_split else "it is trained by rows"
        if self._constraint is not None and (self.has_rows or is_split):
            raise NotImplementedError(
                explain(
                    f"Variable {self.path!r} has the constraint {self._constraint}, but {why}.",
                    expected="a constraint of a variable that one server updates as a whole.",
                    fix="omit the constraint, or use a regularizer.",
                    code="SG609",
                )
            )


class ShardedParameterServerVariable(ParameterServerVariable, ShardedVariable):
    """A Keras variable with shards on parameter servers."""

    _variables: Sequence[Any] = ()  # none before the servers have it

    # Keras's __getitem__ reads the whole value.
    __getitem__ = ShardedVariable.__getitem__
    __repr__ = ShardedVariable.__repr__

    def assign(self, value: object) -> Any:
        """Sets all rows; see `ShardedVariable.assign`."""
        result = super().assign(value)
        return self if self.is_apart else result

    def find_shards(self) -> None:
        """Finds the shards on the servers."""
        placements = self.variable_client.shards(self)
        shards = [_shard_of(self, number, one) for number, one in enumerate(placements)]
        object.__setattr__(self, "_variables", shards)

    def _changed(self) -> Any:
        return self


def _shard_of(
    whole: ParameterServerVariable, number: int, placement: ShardLayout
) -> ParameterServerVariable:
    """Returns a shard as a variable, which is on the servers already."""
    known = whole.variable_client.known.get(repr(Stored(placement.name)))
    if known is not None:  # already created on this worker
        return known
    with making_slot(placement.name), whole.distribute_strategy.scope():
        shard: Any = keras.Variable(
            lambda shape, dtype: jnp.zeros(shape, dtype),  # never called
            shape=placement.shape,
            dtype=placement.dtype,
            trainable=whole.trainable,
            autocast=autocasts(whole),
            aggregation=whole.aggregation,
            synchronization=whole.synchronization,
            name=f"part_{number}",
        )
    set_path(shard, f"{whole.path}/part_{number}")
    shard.has_rows = whole.has_rows
    return shard


# Keyed tables as Keras variables: rows are on the servers, found by 64-bit keys.


@dataclasses.dataclass(frozen=True)
class KeyedTableOptions:
    """Options of a new keyed table.

    Args:
        table: JSON fields of the servers' `TableOptions`, with the `max_rows` of all servers.
        skips_zero: True if the key 0 is padding, which has no row.
    """

    table: Mapping[str, Any]
    skips_zero: bool = False


class KeyedVariable(ParameterServerVariable):
    """A table on parameter servers with a row for each key, or its optimizer slot.

    Its shape is (0, ...), because its rows are only on the servers; steps look them up by key. So
    it has no value to read, save or assign.
    """

    is_keyed = True
    has_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not is_initialized(self):
            self._options: KeyedTableOptions | None = current_annotations().keyed_table
        super().__init__(*args, **kwargs)

    @property
    def remote_table(self) -> tuple[TableClient, str] | None:
        """Client and name of the table, which checkpoints save; None for an optimizer slot."""
        if self._slot is not None:
            return None
        return TableClient(self.variable_client.client), name_of(self)

    @property
    def storage(self) -> Any:
        """An array without rows."""
        return np.zeros(self._shape, jnp.dtype(self._dtype))

    @storage.setter
    def storage(self, value: object) -> None:
        """Does nothing: a value without rows changes none."""

    def assign(self, value: Any) -> Any:
        """Raises a TypeError: a value of this shape has no rows. Slots accept such a value."""
        if self._slot is None or np.shape(value) != self.shape:
            raise _assigned(self)
        return self.value

    def _assign_delta(self, value: object, *, sign: int) -> Any:
        raise _assigned(self)

    def _initialize_with_initializer(self, initializer: Callable[..., Any]) -> None:
        if self._slot is not None:
            self.place = Stored(self._slot() if callable(self._slot) else self._slot)
            return
        options = self._options
        assert options is not None
        self.variable_client.create_keyed(self, options.table, skips_zero=options.skips_zero)

    def rows_outside(self, ids: object) -> Any:
        """Returns rows of keys, pairs of uint32, outside of compiled steps."""
        return self._looked_up(ids, is_trained=False)[0]

    def looked_up(self, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns rows of keys in an eager step, and the places of their gradients."""
        return self._looked_up(keys, is_trained=True)

    def take_rows(self, rows: Rows) -> Any:
        """Raises a TypeError: rows have keys, and no numbers."""
        raise _rows_by_number(self)

    def change_rows(self, method: str, slices: IndexedSlices) -> Any:
        """Raises a TypeError: rows have keys, and no numbers."""
        raise _rows_by_number(self)

    def _looked_up(self, keys: Any, *, is_trained: bool) -> tuple[Any, Any]:
        if in_symbolic_scope():  # only the shape matters
            return jnp.zeros((*keys.shape[:-1], *self.shape[1:]), self.dtype), None
        if isinstance(keys, Tracer):
            raise invalid(
                f"Keys were looked up in {self.path!r} inside lax.scan, lax.cond, jax.jit or "
                "the like.",
                expected="lookups in the replica function itself, which receives the rows "
                "from the servers before it runs.",
                fix="look the keys up before, and use the rows inside.",
            )
        remote = self._home.strategy.placement.remote
        rows, places = remote.rows_of_keys(self, np.asarray(keys), is_trained=is_trained)
        return self._maybe_autocast(jnp.asarray(rows)), jnp.asarray(places)


def _assigned(variable: keras.Variable) -> TypeError:
    return TypeError(
        explain(
            f"The keyed table {variable.path!r} was assigned a value. Its shape has no rows: they "
            "are on the servers, by key.",
            expected="rows that an optimizer changes, or that are restored.",
            fix="restore rows with sg.embedding.restore or sg.train.Checkpoint. set_weights, and "
            "with it EarlyStopping(restore_best_weights=True), cannot set them.",
        )
    )


def _rows_by_number(variable: keras.Variable) -> TypeError:
    return TypeError(
        explain(
            f"Rows of the keyed table {variable.path!r} were read or changed by number.",
            expected="rows by key: the table has no other numbers.",
            fix="look rows up with sg.nn.embedding_lookup(table, sg.embedding.keys(ids)); an "
            "optimizer changes them.",
        )
    )


def whole_gradient(variable: keras.Variable) -> ValueError:
    """Returns the error for a gradient of a keyed table that is no longer rows."""
    return invalid(
        f"The optimizer received a gradient of the keyed table {variable.path!r} that was "
        "changed after sg.value_and_grad.",
        expected="the gradient itself, or IndexedSlices.",
        fix="pass sparse_gradients=True to sg.value_and_grad, and change the values of the "
        "IndexedSlices with dataclasses.replace. Optimizers clip gradients by themselves.",
    )

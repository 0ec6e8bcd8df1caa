"""Keras variables on parameter servers.

On the coordinator each read asks the servers; in a step it returns the value fetched before.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.contexts import get_strategy
from stratagem.errors import explain
from stratagem.execution.lookups import embedding_lookup, is_worth_rows
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.private import autocasts, get_stateless_scope, in_symbolic_scope, set_path
from stratagem.keras.variables.requests import check_explicit_device, is_initialized
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.client.variable_client import Stored, Unplaced, VariableClient
from stratagem.parameter_server.keras.initial_rows import InitialRows
from stratagem.variables.components import WholeValue
from stratagem.variables.distributed import IndexedSlices
from stratagem.variables.registry import Home, VariableKind
from stratagem.variables.sharded_variable import Rows, ShardedVariable, as_slice, changed_rows

if TYPE_CHECKING:
    import jax
    from jax.typing import DTypeLike
    from numpy.typing import ArrayLike


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
    place: Any = None
    held: Any = None
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
            return self._maybe_autocast(self._asked().read_rows(self, np.asarray(rows, np.int64)))
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
            now = variable_client.read_rows(self, rows)
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

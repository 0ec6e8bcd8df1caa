"""Value of a strategy's variable between steps: read, gathered, initialized in its store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.devices.finding import find_devices
from stratagem.devices.lockstep import is_multi_process
from stratagem.devices.shards import assemble_on_host, creating_on_host, local_copy
from stratagem.errors import explain
from stratagem.execution.context.explicit_device import explicit_device, naming_device
from stratagem.execution.embeddings.lookups import is_worth_rows
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.private import get_stateless_scope, in_symbolic_scope
from stratagem.variables.components import WholeValue, store_components
from stratagem.variables.layouts import is_in_parts
from stratagem.variables.placement import sole_device
from stratagem.variables.registry import Home, VariableKind
from stratagem.variables.sharded_store import take_rows
from stratagem.variables.store import Store

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from stratagem.strategies.base.strategy import Strategy

# Reads of variables as they are stored, and reads by one process that others take part in.

_strategy: ContextVar[Strategy | None] = ContextVar("strategy read as stored", default=None)
_announce: ContextVar[Callable[[Any], None] | None] = ContextVar("announce gather", default=None)


@contextlib.contextmanager
def reading_as_stored(strategy: Strategy | None) -> Generator[None]:
    """Makes reads of a strategy's variables in this thread return arrays on all its devices.

    None restores reads on one device.
    """
    token = _strategy.set(strategy)
    try:
        yield
    finally:
        _strategy.reset(token)


def reads_as_stored(strategy: Strategy) -> bool:
    """Returns True in `reading_as_stored` of this strategy."""
    return _strategy.get() is strategy


@contextlib.contextmanager
def announcing_gathers(announce: Callable[[Any], None]) -> Generator[None]:
    """Calls a function with each variable of which this thread is about to gather shards.

    All processes must run a gather; the function makes the others do so.
    """
    token = _announce.set(announce)
    try:
        yield
    finally:
        _announce.reset(token)


def announces_gathers() -> bool:
    """Returns True in `announcing_gathers`."""
    return _announce.get() is not None


def announce_gather(variable: object) -> None:
    """Makes other processes join the gather of a variable, if only this process reads it."""
    if (announce := _announce.get()) is not None:
        announce(variable)


# Variables that a user puts on a device by name, in a block of `keras.device`.
#
# Without this, a strategy that keeps a variable on all its devices would ignore the block.


def noted_device(original: Callable[..., Any]) -> Any:
    """Returns `keras.device` that records the device it names."""

    @contextlib.contextmanager
    def device(device_name: str) -> Generator[Any]:
        with original(device_name) as entered, naming_device(device_name):
            yield entered

    device.__doc__ = original.__doc__
    return device


def check_explicit_device(path: str, home: Home) -> None:
    """Raises where a new variable of a strategy is to be on a device that it cannot be kept on.

    Args:
        path: of the variable.
        home: the strategy and the kind of the variable.

    Raises:
        ValueError: a block of `keras.device` names another device than the strategy's only one.
    """
    name = explicit_device()
    if name is None:
        return
    strategy = home.strategy
    is_shared = home.kind is not VariableKind.ON_READ
    if is_shared and strategy.placement.allows_devices:
        return
    named = tuple(find_devices([name]))
    if named in (tuple(strategy.topology.all_devices or ()), (sole_device(strategy.placement),)):
        return
    raise ValueError(
        explain(
            f"Variable {path!r} was created in keras.device({name!r}), in the scope of {strategy}.",
            expected="no device for a single variable: the strategy places its variables. A "
            "HybridStrategy accepts one, except for ON_READ variables.",
            fix="remove keras.device, or use sg.HybridStrategy.",
            code="SG208",
        )
    )


# Initial values of variables, known outside every trace.


def as_initializer(value: object, dtype: DTypeLike | None) -> tuple[Any, Any, Any]:
    """Turns an initial value into what Keras can also call later, outside a trace.

    Args:
        value: array, number or variable.
        dtype: dtype; None for that of the value.

    Returns:
        The initializer, the shape and the dtype.

    Raises:
        ValueError: a traced value.
    """
    if isinstance(value, keras.Variable):
        value = value.value
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        raise ValueError(
            explain(
                "A variable was given an initial value that a compiled function computes.",
                expected="a value that is known when the variable is created, or an initializer.",
                fix="create the variable with an initializer, and assign the value.",
            )
        )
    # Not as a part of the program that is being traced, nor where it may be too large for a device.
    with jax.ensure_compile_time_eval(), creating_on_host(not isinstance(value, jax.Array)):
        array = jnp.asarray(keras.ops.convert_to_tensor(value, dtype=dtype))
        is_given = array is value

    def initializer(shape: Sequence[int], dtype: DTypeLike | None = None) -> Any:
        # A copy of what the caller has, too: a step donates the buffers of its variables.
        own = jnp.array(array, copy=True) if is_given else array
        # The dtype of a variable is its own: a number's would give way to other operands'.
        return jax.lax.convert_element_type(own, dtype or array.dtype)

    return initializer, array.shape, keras.backend.standardize_dtype(array.dtype)


def draws_same_again(initializer: object) -> bool:
    """Returns True for an initializer of Keras with a seed of its own."""
    kind = type(initializer)
    is_of_keras = getattr(keras.initializers, kind.__name__, None) is kind
    return is_of_keras and isinstance(getattr(initializer, "seed", None), int)


class StoredValue:
    """The value of a variable: a copy on each device, or in a store that the strategy chose.

    `store` is None for a copy on each replica's device. `stored` is the value in its store between
    steps, outside every trace; None until it is initialized. `has_rows` is True for a table whose
    rows replicas look up. `slot_of` is the variable that this is an optimizer's slot of.
    """

    store: Store | None = None
    has_rows: bool = False
    slot_of: Any = None
    whole: WholeValue
    _initial: tuple[Any, Any] | None = None
    _is_table = False
    stored: Any = None  # no property: a step reads and sets thousands
    _home: Home
    _dtype: Any

    @property
    def storage(self) -> Any:
        """The whole array, as its store represents it; None until it is initialized."""
        if self.store is None or self.stored is None:
            return self.stored
        return self.store.replicate(self.stored, self._home.strategy.topology)

    @storage.setter
    def storage(self, value: object) -> None:
        if self.store is None or value is None:
            self.stored = value
        else:
            self.stored = self.store.put(value)

    @property
    def unplaced(self) -> Any:
        """The value as it is stored.

        KerasHub reads it of each weight before it loads them: no copies on all devices for that.
        """
        return self.storage if self.store is None else self.stored

    def _computable(self) -> Any:
        """The value for operations outside of the strategy's programs."""
        if self.store is None or self.stored is None or not self.store.is_pinned:
            return self.stored
        with jax.ensure_compile_time_eval():
            return self.store.load(self.stored)

    @property
    def for_step(self) -> Any:
        """The input of a compiled step of the strategy."""
        if self.store is None:
            return self.storage
        return self.store.for_step(self.stored, self._home.strategy.topology)

    def read_in_place(self) -> Any:
        """Returns a value from another store on one device.

        A user's trace, of `jax.lax.cond` for example, gets it as a constant: shards do not combine
        with
        the values of other variables.
        """
        with contextlib.nullcontext() if in_symbolic_scope() else jax.ensure_compile_time_eval():
            return self.where_read(self.gathered())

    def on_all_devices(self) -> Any:
        """Returns the value on the devices of all replicas, in shards if it is stored in shards."""
        if self._home.kind is not VariableKind.ON_READ:
            return self._computable()
        variable: Any = self
        with reading_as_stored(None):
            return self._home.strategy.topology.replicate(variable.own_value())

    @property
    def is_in_parts(self) -> bool:
        """True if a read of the whole value outside of steps may take all processes."""
        return is_in_parts(self, self._home.strategy.topology)

    def gathered(self) -> Any:
        """Returns the value on one device; if processes hold shards, all of them must call this."""
        if is_multi_process(self.stored):
            if self.whole.storage is self.stored:
                return jnp.asarray(self.whole.gathered)
            if isinstance(jnp.zeros(()), Tracer):  # while Keras infers shapes
                return self._computable()
            if not self.stored.is_fully_replicated:
                announce_gather(self)
        if self.store is None:
            return local_copy(self.stored, self._home.strategy.topology)
        return self.store.gather(self.stored)

    def hold_initial(self, value: jax.Array | np.ndarray, initializer: object = None) -> None:
        """Stores an initial value on this process until all processes agree on process 0's.

        Numbers that Keras's own `initializer` draws again are not stored.
        """
        if not self.is_in_parts or not is_multi_process(self.stored):
            return
        array = np.asarray(value)
        # A slot starts as one number; others need not send theirs.
        is_first = jax.process_index() == self._home.strategy.topology.processes_of_inputs[0][0]
        number = np.zeros((), array.dtype) if not is_first or not array.size else array.flat[0]
        if not is_first or np.all(array == number):
            array = np.broadcast_to(number, array.shape)
        elif draws_same_again(initializer):
            array = initializer
        self._initial = (self.stored, array)

    def take_initial(self) -> np.ndarray[Any, Any] | None:
        """Returns and drops the value of `hold_initial`; None if it was assigned since.

        Only process 0 has the numbers, others have the shape.
        """
        variable: Any = self
        stored, held = self._initial or (None, None)
        self.drop_initial()
        if stored is not self.stored:
            return None
        return np.asarray(variable.initial_value(held, self._dtype)) if callable(held) else held

    def drop_initial(self) -> None:
        """Drops the value of `hold_initial`: all processes have the same."""
        self._initial = None

    @property
    def has_value(self) -> bool:
        """True if it is initialized."""
        return self.stored is not None

    @property
    def is_large_table(self) -> bool:
        """True if rows are looked up and take less time to transfer than the whole table."""
        variable: Any = self
        return self._is_table and is_worth_rows(variable.shape)

    def choose_store(self) -> None:
        """Sets the store that the strategy chooses, before there is a value."""
        variable: Any = self
        if self.slot_of is None:
            check_explicit_device(variable.path, self._home)
        policy = self._home.strategy.placement
        if policy is None or self._home.kind is VariableKind.ON_READ:
            return
        self.store = policy.choose(self, self.slot_of)
        serves_rows = self.store is not None and self.store.serves_rows
        self.has_rows = serves_rows and self.is_large_table

    def __array__(
        self, dtype: DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """Returns the value on the host, where shards are joined: no device needs memory for it."""
        variable: Any = self
        is_divided = self.store is not None or variable.division is not None
        if is_divided and get_stateless_scope() is None and self._is_all_here():
            return np.asarray(assemble_on_host(self.stored), dtype)
        return np.asarray(variable.value, dtype)

    def _is_all_here(self) -> bool:
        """Returns True if this process has all shards of the value."""
        stored = self.stored
        return isinstance(stored, jax.Array) and (
            not self.is_in_parts or stored.is_fully_addressable
        )

    def where_read(self, value: jax.Array) -> Any:
        """Returns a value on the device of all reads outside of steps.

        Code that computes with several values there would otherwise mix devices.
        """
        strategy = self._home.strategy
        if not strategy.placement.uses_stores or self.has_rows or isinstance(value, Tracer):
            return value  # a large table is not moved
        return self._moved(value)

    def rows_outside(self, ids: object) -> Any:
        """Returns rows of a table for use outside of steps; `ids` are integers of any shape."""
        variable: Any = self
        if (value := variable._value_in_scope()) is None:
            value = self._computable()
        rows = local_copy(take_rows(value, np.asarray(ids)), self._home.strategy.topology)
        return variable._maybe_autocast(self._moved(rows))

    def _moved(self, value: jax.Array) -> Any:
        strategy = self._home.strategy
        device = sole_device(strategy.placement) or strategy.topology.local_devices[0]
        is_there = value.devices() == {device} or is_multi_process(value)
        return value if is_there else jax.device_put(value, device)

    def assigned_as_rows(self, value: object) -> Any:
        """Sets the rows that this variable stands for during an update of a table's rows.

        Returns the value, or None if the variable stands for the whole table and nothing is set.
        """
        variable: Any = self
        scope = current_scope()
        if scope is None or id(self) not in scope.row_counts:
            return None
        rows = variable._convert_to_tensor(value, dtype=self._dtype)
        assert rows.shape == (scope.row_counts[id(self)], *variable.shape[1:])
        scope.add_update((self, rows))
        return rows

    def assign_to_first_component(self, value: object) -> None:
        """Stores a whole value of an ON_READ variable with aggregation SUM, without dividing it."""
        variable: Any = self
        if self._home.kind is VariableKind.ON_READ:
            topology = self._home.strategy.topology
            stacked = np.zeros((topology.num_replicas, *variable.shape), self._dtype)
            stacked[0] = np.asarray(value)
            store_components(self, stacked, topology)
        else:
            variable.assign(value)


def unshared(value: object) -> object:
    """Returns a value that no other variable and no caller holds, as the next step donates it."""
    value = value.value if isinstance(value, keras.Variable) else value
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    return jnp.array(value, copy=True) if value.is_fully_addressable else value

"""Keras variables of a strategy: reads, assignments and aggregation.

Tested on Keras 3.12 to 3.16.
"""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem import contexts as stack
from stratagem.contexts import get_strategy, in_update_context, note_use
from stratagem.devices.lockstep import is_multi_process
from stratagem.devices.mesh import outside_context_mesh
from stratagem.devices.shards import (
    MIN_SLICED_BYTES,
    assemble_on_host,
    creating_on_host,
    local_copy,
    put_slices,
)
from stratagem.errors import explain, invalid
from stratagem.execution.lookups import is_worth_rows
from stratagem.execution.replica_context import ReplicaContext, get_replica_context
from stratagem.execution.tracing.errors import foreign_variable
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.private import get_stateless_scope, in_symbolic_scope
from stratagem.keras.variables.requests import (
    as_initializer,
    check_explicit_device,
    current_annotations,
    draws_same_again,
    is_initialized,
)
from stratagem.keras.variables.rows import RowUpdates, note_assignment
from stratagem.options import ReduceOp, VariableAggregation
from stratagem.resources import setting
from stratagem.strategies.reduction import of_all
from stratagem.variables.components import (
    WholeValue,
    aggregate_components,
    initial_digest,
    spread_over_components,
    store_components,
    stored_components,
)
from stratagem.variables.distributed import Mirrored, PerReplica
from stratagem.variables.layouts import Division, Store, is_in_parts, put_stored
from stratagem.variables.placement import sole_device, take_rows
from stratagem.variables.registry import (
    Home,
    VariableKind,
    choose_kind,
    parse_aggregation,
    parse_synchronization,
)
from stratagem.variables.sharded_variable import ScatterMethods

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from stratagem.strategies.strategy import Strategy

# Reads of variables as they are stored, and reads by one process that others take part in.

_strategy: ContextVar[Strategy | None] = ContextVar("strategy read as stored", default=None)
_announce: ContextVar[Callable[[Any], None] | None] = ContextVar("announce gather", default=None)


def reading_as_stored(strategy: Strategy | None) -> contextlib.AbstractContextManager[object]:
    """Makes reads of a strategy's variables in this thread return arrays on all its devices.

    None restores reads on one device.
    """
    return setting(_strategy, strategy)


def reads_as_stored(strategy: Strategy) -> bool:
    """Returns True in `reading_as_stored` of this strategy."""
    return _strategy.get() is strategy


def announcing_gathers(
    announce: Callable[[Any], None],
) -> contextlib.AbstractContextManager[object]:
    """Calls a function with each variable of which this thread is about to gather shards.

    All processes must run a gather; the function makes the others do so.
    """
    return setting(_announce, announce)


def announces_gathers() -> bool:
    """Returns True in `announcing_gathers`."""
    return _announce.get() is not None


def announce_gather(variable: object) -> None:
    """Makes other processes join the gather of a variable, if only this process reads it."""
    if (announce := _announce.get()) is not None:
        announce(variable)


# Errors for invalid assignments to a strategy's variables.


def delta_outside(method: str, path: str) -> ValueError:
    """Error for a delta assigned to an ON_READ sum in cross-replica context."""
    return invalid(
        f"{method} was called in cross-replica context on {path!r}, an ON_READ variable with "
        "aggregation SUM.",
        expected="assign, or a call in a replica function: outside of one, it is unclear "
        "whether the value counts once or once per replica.",
        fix="use assign(variable + value), or call it in the function passed to strategy.run.",
        code="SG205",
    )


def parts_in_replica(path: str) -> TypeError:
    """Error for a `PerReplica` assigned in a replica function."""
    return TypeError(
        explain(
            f"A PerReplica was assigned to {path!r} in a replica function.",
            expected="this replica's part.",
            fix="pass the PerReplica through `args` of strategy.run.",
            code="SG206",
        )
    )


def parts_without_aggregation(path: str) -> TypeError:
    """Error for a `PerReplica` assigned to a variable without aggregation."""
    return TypeError(
        explain(
            f"A PerReplica was assigned to {path!r}, whose aggregation is NONE.",
            expected="a plain value, or a variable with an aggregation.",
            fix='reduce the value first, or create the variable with aggregation="sum" or "mean".',
            code="SG204",
        )
    )


def number_to_sum(value: object, path: str) -> ValueError:
    """Error for a Python number assigned to a SUM variable: once, or once per replica?"""
    return invalid(
        f"A replica function assigned the Python number {value!r} to {path!r}, "
        "whose "
        "aggregation is SUM.",
        expected="an array, which counts once a replica.",
        fix="pass an array (jax.numpy.asarray), or divide by num_replicas_in_sync "
        "if the number "
        "is meant once.",
        code="SG205",
    )


_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)


# ScatterMethods is last, so that in a class that is also a ShardedVariable Keras's methods come
# before those of ShardedVariable.
class DistributedVariable(RowUpdates, keras.Variable, ScatterMethods):
    """A Keras variable created in a strategy's scope.

    Created by `keras.Variable` itself; takes its arguments. Its value is a copy on each replica's
    device, or in a store that the strategy chose.

    Raises:
        ValueError: annotations that make no sense with several replicas.
    """

    initial_digest: int = 0
    agreed_number: int | None = None
    # None for a copy on each replica's device.
    store: Store | None = None
    # The value in its store between steps, outside every trace; None until it is initialized. No
    # property: a step reads and sets thousands.
    stored: Any = None
    has_rows: bool = False  # True for a table whose rows replicas look up
    slot_of: Any = None  # the variable that this is an optimizer's slot of
    # What each replica trains where they train apart; the variable itself is the global model.
    local_copy: Any = None
    # Variables that the next synchronization needs, by name.
    outer_state: Mapping[str, Any] = types.MappingProxyType({})
    whole: WholeValue
    _initial: tuple[Any, Any] | None = None
    _is_table = False
    _home: Home
    _dtype: Any
    _layout: Any  # Keras hands it to the slots that an optimizer makes for the variable
    _shape: tuple[int, ...]

    @outside_context_mesh
    def __init__(
        self,
        initializer: object,
        shape: Sequence[int] | None = None,
        dtype: DTypeLike | None = None,
        trainable: bool = True,
        autocast: bool = True,
        aggregation: object = "none",
        synchronization: object = "auto",
        name: str | None = None,
        **kwargs: object,
    ) -> None:
        if is_initialized(self):
            return
        is_stateless = get_stateless_scope() is not None and current_scope() is None
        # A value in a StatelessScope is left for Keras to refuse.
        if not is_stateless and not callable(initializer) and not isinstance(initializer, str):
            initializer, shape, dtype = as_initializer(initializer, dtype)
        annotated = current_annotations()
        if annotated.kind is not None:
            synchronization, aggregation = annotated.kind
        strategy = get_strategy()
        parsed = parse_aggregation(aggregation)
        parsed_synchronization = parse_synchronization(synchronization)
        kind = choose_kind(
            parsed_synchronization,
            parsed,
            dtype=keras.backend.standardize_dtype(dtype) if dtype else keras.config.floatx(),
            num_replicas=strategy.num_replicas_in_sync,
            name=name or type(self).__name__,
        )
        self._home = Home(strategy, kind, parsed)
        self._is_table = annotated.is_table
        self._starts_once = parsed is VariableAggregation.SUM and annotated.is_of_metric
        self.slot_of = annotated.slot_of
        self.whole = WholeValue()
        super().__init__(
            initializer,
            shape=shape,
            dtype=dtype,
            trainable=trainable,
            autocast=autocast,
            aggregation=parsed.name.lower(),
            synchronization=parsed_synchronization.name.lower(),
            name=name or "variable",
            **kwargs,
        )
        strategy.variables.add(self, self._home)

    @property
    def _value(self) -> Any:
        return self.unplaced

    @_value.setter
    def _value(self, value: object) -> None:
        self.storage = value

    @property
    def distribute_strategy(self) -> Any:
        """The strategy that the variable belongs to."""
        return self._home.strategy

    @property
    def value(self) -> Any:
        """This replica's value in a replica function, else the value of all copies."""
        return self._maybe_autocast(self.own_value())

    @outside_context_mesh
    def own_value(self) -> Any:
        """The value in the variable's dtype, even inside layers that autocast."""
        value = self._value_in_scope()
        if value is None:
            return self._global_value()
        context = self._merge_context()
        if context is None:
            return value
        if self._home.aggregation is VariableAggregation.NONE:
            aggregate_components(value, self._home.aggregation, self.path)  # raises the reason
        return self._aggregate(value, context)

    def _value_in_scope(self) -> Any:
        """Returns this replica's value in a replica function; None outside."""
        scope = get_stateless_scope()
        value = scope.get_current_value(self) if scope is not None else None
        if value is None and (replica_scope := current_scope()) is not None:
            value = replica_scope.get_current_value(self)
        return value

    def _has_scope(self) -> bool:
        """Returns True if an assignment changes the values of a step, and not the storage."""
        return get_stateless_scope() is not None or current_scope() is not None

    def _merge_context(self) -> ReplicaContext | None:
        """Returns the replica whose compiled step called merge_call; None if it is irrelevant."""
        frame = stack.current_frame()
        if self._home.kind is not VariableKind.ON_READ or frame is None:
            return None
        is_merging = frame.kind is stack.FrameKind.MERGE and current_scope() is not None
        return frame.replica if is_merging else None

    def _require_own_replica(self) -> None:
        """Raises an error in another strategy's replica function, which would bypass the copies."""
        note_use()
        frame = stack.current_frame()
        if frame is None or frame.kind is not stack.FrameKind.REPLICA:
            return
        if frame.strategy is not self._home.strategy:
            raise foreign_variable(self, self._home.strategy, frame.strategy)

    def _global_value(self) -> Any:
        self._require_own_replica()
        if reads_as_stored(self._home.strategy) and self.has_value:
            return self.on_all_devices()
        if self.is_in_parts and self.has_value:
            return self.read_in_place()  # its storage would be a copy on each device
        if self.storage is None:
            return self._initializer(self._shape, dtype=self._dtype)
        if self._home.kind is VariableKind.ON_READ:
            if self.asks_all_processes():
                return self.whole.of(self.storage, self._home.aggregation, self.path)
            value = aggregate_components(self.storage, self._home.aggregation, self.path)
            return self.where_read(local_copy(value, self._home.strategy.topology))
        return local_copy(self.storage, self._home.strategy.topology)

    def asks_all_processes(self) -> bool:
        """True if a read here runs a program on all processes."""
        if self._home.kind is not VariableKind.ON_READ or self._value_in_scope() is not None:
            return False
        # Keras infers shapes while it traces.
        return is_multi_process(self.storage) and not isinstance(jnp.zeros(()), Tracer)

    @outside_context_mesh
    def store_whole(self, value: object) -> None:
        """Sets the value of all copies; for an ON_READ variable, of all components."""
        self._direct_assign(value)

    def _direct_assign(self, value: object) -> None:
        self._require_own_replica()
        if self._home.strategy.topology.spans_processes:
            note_assignment(self, self._home, value)
        topology = self._home.strategy.topology
        if self._home.kind is VariableKind.ON_READ:
            spread = spread_over_components(value, self._spreading(), topology.num_replicas)
            store_components(self, spread, topology)
        elif self.store is None:
            self.storage = put_stored(self, value, topology)
        else:
            self.stored = self.store.put(value)
        if self.local_copy is not None:
            self.local_copy.store_whole(value)

    def _spreading(self) -> VariableAggregation:
        """Returns how a whole value becomes components; in update context each takes it whole."""
        return VariableAggregation.NONE if in_update_context() else self._home.aggregation

    def _initialize_with_initializer(self, initializer: Callable[..., Any]) -> None:
        self.find_division()
        self.choose_store()
        value = self.initial_value(initializer, self._dtype)
        self.initial_digest = initial_digest(value, self._home.strategy.topology)
        if self._home.kind is VariableKind.ON_READ:  # each component starts with the whole value
            topology = self._home.strategy.topology
            stacked = np.broadcast_to(np.asarray(value), (topology.num_replicas, *value.shape))
            if self._starts_once:  # a metric's sum matches a single device from the start
                stacked = np.concatenate([stacked[:1], np.zeros_like(stacked[1:])])
            self.storage = stored_components(stacked, topology)
        else:
            self._direct_assign(value)
            self.hold_initial(value, initializer)

    @outside_context_mesh
    def assign(self, value: object) -> Any:
        """Sets the value; in a replica function by the variable's aggregation."""
        value = self._contribution(value)
        merging = self._merge_context()
        if merging is not None:
            whole = self._convert_to_tensor(value, dtype=self._dtype)
            count = merging.num_replicas_in_sync
            spread = jnp.asarray(spread_over_components(whole, self._home.aggregation, count))
            super().assign(spread[merging.replica_id_in_sync_group])
            return whole
        context = self.aggregating_context()
        if context is None or self._home.aggregation is VariableAggregation.NONE:
            return self.assign_own(value)
        return super().assign(self._aggregate(value, context))

    def assign_own(self, value: object) -> Any:
        """Sets a value that must be provably equal on all replicas, without aggregation."""
        if (rows := self.assigned_as_rows(value)) is not None:
            return rows
        if not self._has_scope() and self.assigned_in_slices(value):
            return value
        result = super().assign(value if self._has_scope() else unshared(value))
        is_own = self._home.aggregation is VariableAggregation.NONE
        scope = current_scope() if is_own and self.aggregating_context() is not None else None
        if scope is not None and id(self) in scope.writes:
            scope.mark_unproven(self)
        return result

    def assign_add(self, value: object) -> Any:
        """Adds a value; in a replica function the replicas' values are aggregated first."""
        return self._assign_delta(value, sign=1)

    def assign_sub(self, value: object) -> Any:
        """Subtracts a value; in a replica function the replicas' values are aggregated first."""
        return self._assign_delta(value, sign=-1)

    @outside_context_mesh
    def _assign_delta(self, value: object, *, sign: int) -> Any:
        value = self._contribution(value)
        context = self.aggregating_context()
        if context is not None and self._home.aggregation is not VariableAggregation.NONE:
            delta = self._aggregate(value, context)
            return super().assign(self + delta if sign > 0 else self - delta)
        if self._is_whole_on_read():
            self._check_component_delta(sign)
            if not isinstance(value, Tracer):
                value = np.asarray(value)
            if self._home.strategy.topology.spans_processes:
                note_assignment(self, self._home, value)
            self.storage = self.storage + sign * jnp.asarray(value, self._dtype)
            return self._whole_after_update()
        if self._merge_context() is not None:
            self._check_component_delta(sign)
            own = self._value_in_scope()
            super().assign(own + sign * jnp.asarray(value, self._dtype))
            return self._whole_after_update()
        return self.assign(self + value if sign > 0 else self - value)

    def _is_whole_on_read(self) -> bool:
        """Returns True for an ON_READ variable outside replica functions."""
        if self._home.kind is not VariableKind.ON_READ:
            return False
        return get_stateless_scope() is None

    def _whole_after_update(self) -> Any:
        """Returns the value that the components aggregate to, or None if undefined."""
        is_none = self._home.aggregation is VariableAggregation.NONE
        return None if is_none else self.value

    def _check_component_delta(self, sign: int) -> None:
        if self._home.aggregation is VariableAggregation.SUM and not in_update_context():
            method = "assign_add" if sign > 0 else "assign_sub"
            raise delta_outside(method, self.path)

    def _contribution(self, value: object) -> Any:
        """Returns this replica's part of a distributed value, where that is allowed."""
        if isinstance(value, Mirrored):
            return value.value
        if not isinstance(value, PerReplica):
            return value
        if value.local is not None or (get_replica_context() is not None and current_scope()):
            raise parts_in_replica(self.path)
        if self._home.aggregation is VariableAggregation.NONE:
            raise parts_without_aggregation(self.path)
        if self._home.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            count = self._home.strategy.num_replicas_in_sync
            return of_all(value, count).components[0]
        op = ReduceOp.from_variable_aggregation(self._home.aggregation)
        return self._home.strategy.reduce(op, value, axis=None)

    def aggregating_context(self) -> ReplicaContext | None:
        """Returns the context in which an assignment is aggregated over replicas, or None."""
        if self._home.kind is not VariableKind.MIRRORED or in_update_context():
            return None
        context = get_replica_context()
        return None if context is None or context.strategy is not self._home.strategy else context

    def _aggregate(self, value: object, context: ReplicaContext) -> Any:
        aggregation = self._home.aggregation
        is_number = isinstance(value, int | float | complex) and not isinstance(value, np.generic)
        if aggregation is VariableAggregation.SUM and is_number:
            raise number_to_sum(value, self.path)
        own = self._convert_to_tensor(value, dtype=self._dtype)
        scope = current_scope()
        if not self.has_value and scope is not None and scope.replica is not None:
            # An eager call that creates variables runs again. It is the first replica alone that
            # builds layers, so what it assigns there stands for all.
            is_sum = aggregation is VariableAggregation.SUM
            return own * context.num_replicas_in_sync if is_sum else own
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            is_first = context.replica_id_in_sync_group == 0
            own = jnp.where(is_first, own, jnp.zeros_like(own))
            return context.communicator.all_reduce(ReduceOp.SUM, own)
        op = ReduceOp.from_variable_aggregation(aggregation)
        return context.communicator.all_reduce(op, own)

    @outside_context_mesh
    def settle(self, home: Home, value: jax.Array | np.ndarray) -> None:
        """Moves the value of a variable that joins a strategy to the strategy's store."""
        self._home = home
        self.whole = WholeValue()
        self.find_division()
        home.strategy.variables.add(self, home)
        self.choose_store()
        self.initial_digest = initial_digest(value, home.strategy.topology)
        self._direct_assign(value)
        self.hold_initial(value)

    @outside_context_mesh
    def initialize(self) -> None:
        """Sets the initial value of a variable created in a step."""
        self._deferred_initialize()

    # Its place between steps, and the whole value of what is stored in parts.

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
        with reading_as_stored(None):
            return self._home.strategy.topology.replicate(self.own_value())

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
        stored, held = self._initial or (None, None)
        self.drop_initial()
        if stored is not self.stored:
            return None
        return np.asarray(self.initial_value(held, self._dtype)) if callable(held) else held

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
        return self._is_table and is_worth_rows(self.shape)

    def choose_store(self) -> None:
        """Sets the store that the strategy chooses, before there is a value."""
        if self.slot_of is None:
            check_explicit_device(self.path, self._home)
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
        is_divided = self.store is not None or self.division is not None
        if is_divided and get_stateless_scope() is None and self._is_all_here():
            return np.asarray(assemble_on_host(self.stored), dtype)
        return np.asarray(self.value, dtype)

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
        if (value := self._value_in_scope()) is None:
            value = self._computable()
        rows = local_copy(take_rows(value, np.asarray(ids)), self._home.strategy.topology)
        return self._maybe_autocast(self._moved(rows))

    def _moved(self, value: jax.Array) -> Any:
        strategy = self._home.strategy
        device = sole_device(strategy.placement) or strategy.topology.local_devices[0]
        is_there = value.devices() == {device} or is_multi_process(value)
        return value if is_there else jax.device_put(value, device)

    def assigned_as_rows(self, value: object) -> Any:
        """Sets the rows that this variable stands for during an update of a table's rows.

        Returns the value, or None if the variable stands for the whole table and nothing is set.
        """
        scope = current_scope()
        if scope is None or id(self) not in scope.row_counts:
            return None
        rows = self._convert_to_tensor(value, dtype=self._dtype)
        assert rows.shape == (scope.row_counts[id(self)], *self.shape[1:])
        scope.add_update((self, rows))
        return rows

    def assign_to_first_component(self, value: object) -> None:
        """Stores a whole value of an ON_READ variable with aggregation SUM, without dividing it."""
        if self._home.kind is VariableKind.ON_READ:
            topology = self._home.strategy.topology
            stacked = np.zeros((topology.num_replicas, *self.shape), self._dtype)
            stacked[0] = np.asarray(value)
            store_components(self, stacked, topology)
        else:
            self.assign(value)

    def keep_local_copy(self, copy: Any, outer_state: Mapping[str, Any]) -> None:
        """Makes replicas read and assign a copy of this variable in their training steps."""
        self.local_copy, self.outer_state = copy, outer_state

    # Copies that are divided over the devices of their replica, by a strategy's layouts.

    @property
    def division(self) -> Division | None:
        """Division of each copy over the devices of its replica; None if it is not divided."""
        return self._layout if isinstance(self._layout, Division) else None

    def find_division(self) -> None:
        """Sets the division from the strategy's layouts; without one, Keras's own layout stays."""
        layouts = self._home.strategy.placement.layouts
        inherited, division = self.division, None
        if layouts is not None and self._home.kind is not VariableKind.ON_READ:
            division = layouts.division(
                self.path,
                self._shape,
                inherited,
                is_trainable=self.trainable,
                itemsize=jax.dtypes.canonicalize_dtype(self._dtype).itemsize,
            )
        if division is not None or inherited is not None:
            self._layout = division

    def initial_value(self, initializer: Callable[..., Any], dtype: DTypeLike) -> Any:
        """Returns the initial value; on the host where no device needs have room for the whole.

        A large constant takes no memory.

        Args:
            initializer: of Keras.
            dtype: of the variable.
        """
        is_in_parts = self.division is not None or self.store is not None
        with creating_on_host(is_in_parts):
            if is_in_parts and type(initializer) in _CONSTANTS:
                number = np.asarray(initializer((), dtype=dtype))
                num_bytes = number.nbytes * math.prod(self._shape)
                if number.ndim == 0 and num_bytes >= MIN_SLICED_BYTES:
                    return np.broadcast_to(number, self._shape)
            return self._convert_to_tensor(initializer(self._shape, dtype=dtype))

    def _convert_to_tensor(self, value: object, dtype: object = None) -> Any:
        is_in_parts = self.division is not None or self.store is not None
        with creating_on_host(is_in_parts and not isinstance(value, jax.Array)):
            return super()._convert_to_tensor(value, dtype=dtype)

    def _takes_slices(self, value: object) -> bool:
        """Returns True for a large array on the host whose slices become this variable's shards."""
        if not isinstance(value, np.ndarray) or self.local_copy is not None:
            return False
        stored = self.stored
        is_in_shards = isinstance(stored, jax.Array) and not stored.is_fully_replicated
        is_shared = self._home.kind is not VariableKind.ON_READ
        is_large = value.nbytes >= MIN_SLICED_BYTES and value.shape == tuple(self._shape)
        return is_in_shards and is_shared and is_large

    def assigned_in_slices(self, value: Any) -> bool:
        """Sets a large value by shards: neither a device nor JAX's host memory holds the whole.

        Returns False for other values.
        """
        if not self._takes_slices(value):
            return False
        self._require_own_replica()
        if self._home.strategy.topology.spans_processes:
            note_assignment(self, self._home, value)
        self.stored = put_slices(value, self.stored.sharding, self._dtype)
        self._initial = None  # process 0 would hold the whole until the first step
        return True


def unshared(value: object) -> object:
    """Returns a value that no other variable and no caller holds, as the next step donates it."""
    value = value.value if isinstance(value, keras.Variable) else value
    if not isinstance(value, jax.Array) or isinstance(value, Tracer):
        return value
    if not value.is_fully_addressable:
        return value
    # On its own device: `jnp.array` copies an uncommitted array to the default device, which may
    # have no room for a table.
    return jax.device_put(value, value.sharding, may_alias=False)

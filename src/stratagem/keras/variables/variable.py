"""Keras variables of a strategy: reads, assignments and aggregation.

Tested on Keras 3.12 to 3.16.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem import contexts as stack
from stratagem.contexts import get_strategy, in_update_context, note_use
from stratagem.devices.context_mesh import outside_context_mesh
from stratagem.devices.lockstep import is_multi_process
from stratagem.devices.shards import MIN_SLICED_BYTES, creating_on_host, local_copy, put_slices
from stratagem.errors import explain
from stratagem.execution.context.replica import ReplicaContext, get_replica_context
from stratagem.execution.tracing.errors import foreign_variable
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.keras.private import get_stateless_scope
from stratagem.keras.variables.annotations import (
    current_annotations,
    is_making_state_of_metric,
    is_making_table,
    owner_of_new_slot,
)
from stratagem.keras.variables.copied_assignments import note_assignment
from stratagem.keras.variables.row_updates import RowUpdates
from stratagem.keras.variables.stored_value import (
    StoredValue,
    as_initializer,
    reads_as_stored,
    unshared,
)
from stratagem.keras.variables.variable_source import is_initialized
from stratagem.options import ReduceOp, VariableAggregation
from stratagem.strategies.base.reduction import of_all
from stratagem.variables.components import (
    WholeValue,
    aggregate_components,
    spread_over_components,
    store_components,
    stored_components,
)
from stratagem.variables.distributed import Mirrored, PerReplica
from stratagem.variables.initial_values import initial_digest
from stratagem.variables.layouts import Division, put_stored
from stratagem.variables.registry import (
    Home,
    VariableKind,
    choose_kind,
    parse_aggregation,
    parse_synchronization,
)
from stratagem.variables.store import Store

if TYPE_CHECKING:
    from jax.typing import DTypeLike

# Local copies: the weights of each replica, where replicas train apart for some steps.


class LocalCopies:
    """The part of a variable that knows its local copy; the variable itself is the global model."""

    local_copy: Any = None
    # Variables that the next synchronization needs, by name.
    outer_state: Mapping[str, Any] = types.MappingProxyType({})

    fragment_sends: Any = None  # of the variables that an optimizer trains, if this is the first

    def keep_local_copy(self, copy: Any, outer_state: Mapping[str, Any]) -> None:
        """Makes replicas read and assign a copy of this variable in their training steps."""
        self.local_copy, self.outer_state = copy, outer_state


# Errors for invalid assignments to a strategy's variables.


def delta_outside(method: str, path: str) -> ValueError:
    """Error for a delta assigned to an ON_READ sum in cross-replica context."""
    return ValueError(
        explain(
            f"{method} was called in cross-replica context on {path!r}, an ON_READ variable with "
            "aggregation SUM.",
            expected="assign, or a call in a replica function: outside of one, it is unclear "
            "whether the value counts once or once per replica.",
            fix="use assign(variable + value), or call it in the function passed to strategy.run.",
            code="SG205",
        )
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
    return ValueError(
        explain(
            f"A replica function assigned the Python number {value!r} to {path!r}, "
            "whose "
            "aggregation is SUM.",
            expected="an array, which counts once a replica.",
            fix="pass an array (jax.numpy.asarray), or divide by num_replicas_in_sync "
            "if the number "
            "is meant once.",
            code="SG205",
        )
    )


# Variables whose copies are divided over the devices of their replica, by a strategy's layouts.

_CONSTANTS = (keras.initializers.Zeros, keras.initializers.Ones, keras.initializers.Constant)


class DividedCopies:
    """Layout of a variable's copy over the devices of a replica.

    Keras hands `_layout` of a variable to the slots that an optimizer makes for it.
    """

    store: Store | None
    stored: Any
    local_copy: Any
    _home: Home
    _initial: Any
    _dtype: Any
    _layout: Any
    _shape: tuple[int, ...]
    _dtype: Any
    path: str
    trainable: bool
    _require_own_replica: Callable[[], None]

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
        above: Any = super()
        is_in_parts = self.division is not None or self.store is not None
        with creating_on_host(is_in_parts and not isinstance(value, jax.Array)):
            return above._convert_to_tensor(value, dtype=dtype)

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


class DistributedVariable(StoredValue, DividedCopies, RowUpdates, LocalCopies, keras.Variable):
    """A Keras variable created in a strategy's scope.

    Created by `keras.Variable` itself; takes its arguments.

    Raises:
        ValueError: annotations that make no sense with several replicas.
    """

    initial_digest: int = 0
    agreed_number: int | None = None
    _home: Home

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
        if (annotations := current_annotations()) is not None:
            synchronization, aggregation = annotations
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
        self._is_table = is_making_table()
        self._starts_once = parsed is VariableAggregation.SUM and is_making_state_of_metric()
        self.slot_of = owner_of_new_slot()
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

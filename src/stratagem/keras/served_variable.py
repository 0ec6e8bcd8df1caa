"""Keras variables that live on parameter servers.

On the coordinator each read asks the servers; in a step they answer with what was read before it.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.context import get_strategy
from stratagem.context.function_trace import current_function_trace
from stratagem.execution import current_scope
from stratagem.keras.initial_rows import InitialRows
from stratagem.keras.private import get_stateless_scope, in_symbolic_scope
from stratagem.keras.variable import DistributedVariable
from stratagem.messages import explain
from stratagem.options import VariableSynchronization
from stratagem.strategies import Serving, Stored, Unplaced
from stratagem.variables import VariableKind, parse_aggregation, parse_synchronization

__all__ = ["ServedVariable", "is_collected", "kept_in_process", "making_slot", "making_table"]

# A smaller table travels whole in less time than its rows are picked out.
_MIN_TABLE_SIZE = 65_536
# A larger initial value is made row by row, where it is held.
_MAX_LOCAL_BYTES = 64 * 2**20


class _Next(threading.local):
    """What the variable that is created now will be."""

    table = False
    in_process = False
    slot: str | None = None


_next: _Next = _Next()


@contextlib.contextmanager
def making_table() -> Generator[None]:
    """Variables that are created in a `with` block are tables, of which rows are looked up."""
    _next.table, previous = True, _next.table
    try:
        yield
    finally:
        _next.table = previous


@contextlib.contextmanager
def kept_in_process() -> Generator[None]:
    """Variables that are created in a `with` block are each process's own, as seeds are."""
    _next.in_process, previous = True, _next.in_process
    try:
        yield
    finally:
        _next.in_process = previous


@contextlib.contextmanager
def making_slot(name: str) -> Generator[None]:
    """The variable that is created in a `with` block is what servers keep by that name."""
    _next.slot, previous = name, _next.slot
    try:
        yield
    finally:
        _next.slot = previous


def _has_axes(initializer: Any, shape: Any) -> bool:
    """Whether a variable will not be a scalar."""
    if shape is not None or callable(initializer) or isinstance(initializer, str):
        return shape is None or bool(np.size(shape))
    return bool(np.ndim(initializer))


def is_collected(synchronization: Any, aggregation: Any) -> bool:
    """Tells whether a variable is counted in each worker, and added up by the coordinator.

    Args:
        synchronization: its annotation, in any form.
        aggregation: its annotation, in any form.
    """
    on_read = parse_synchronization(synchronization) is VariableSynchronization.ON_READ
    return _next.in_process or (on_read and parse_aggregation(aggregation).name == "SUM")


class ServedVariable(DistributedVariable):
    """A Keras variable that was created in the scope of a `ParameterServerStrategy`.

    Made by `keras.Variable` itself; takes its arguments.

    Raises:
        NotImplementedError: a constraint, or use in an `sg.function`.
    """

    place: Any = None
    held: Any = None
    has_rows: bool = False
    _slot: str | None = None
    _is_table: bool = False

    def __init__(
        self,
        initializer: Any,
        shape: Any = None,
        dtype: Any = None,
        trainable: bool = True,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # In a step Keras asks for the initial value later.
        self._slot, self._is_table = _next.slot, _next.table
        if self._slot is None and (trainable or _has_axes(initializer, shape)):
            # Here, because what Keras has noted as not initialised it tries in each later step.
            get_strategy().serving.require_coordinator(kwargs.get("name") or "variable")
        super().__init__(initializer, shape, dtype, trainable, *args, **kwargs)

    @property
    def serving(self) -> Serving:
        """What asks the servers."""
        return self._home.strategy.serving

    @property
    def is_slot(self) -> bool:
        """Whether it is what an optimizer keeps for another variable."""
        return self._slot is not None

    @property
    def is_added_to(self) -> bool:
        """Whether a step writes a difference: as of averages that all workers move."""
        return self._synchronization == "on_read"

    @property
    def has_value(self) -> bool:
        """Whether it is initialised."""
        return self.place is not None

    @property
    def storage(self) -> Any:
        """In a step what it has read, elsewhere what the servers hold now."""
        if current_function_trace() is not None:
            raise NotImplementedError(
                explain(
                    f"Variable {self.path!r} of a ParameterServerStrategy was used in an "
                    "sg.function.",
                    expected="strategy.run, which compiles by itself and asks the servers.",
                    fix="schedule a plain Python function that calls strategy.run.",
                )
            )
        if self.held is not None and self.serving.is_in_step:
            return self.held
        return self.serving.read(self)

    @storage.setter
    def storage(self, value: Any) -> None:
        if value is None:
            return
        if self.serving.is_in_step:
            self.held = value
        else:
            self.serving.assign(self, value)

    @property
    def _value(self) -> Any:
        """Keras asks whether it is None."""
        return None if self.place is None else self.storage

    @_value.setter
    def _value(self, value: Any) -> None:
        self.storage = value

    def _global_value(self) -> Any:
        self._require_own_replica()
        if self.place is None:
            return self._initializer(self._shape, dtype=self._dtype)
        if in_symbolic_scope():  # in a trace, where this is a shape and no array
            return jnp.zeros(self._shape, self._dtype)
        value = self.storage
        if isinstance(value, Tracer):
            return value
        if self._home.kind is VariableKind.ON_READ and self.serving.is_in_step:
            return jnp.asarray(np.asarray(value).mean(0), self._dtype)
        return jnp.asarray(value, self._dtype)

    def asks_all_processes(self) -> bool:
        """Whether reading it here takes a program that all processes run: never."""
        return False

    def _direct_assign(self, value: Any) -> None:
        self._require_own_replica()
        self.serving.assign(self, value)

    def _initialize_with_initializer(self, initializer: Any) -> None:
        shape: Any = self._shape
        if self._slot is not None:
            self.place = Stored(self._slot)
            return
        num_bytes = math.prod(shape) * np.dtype(jnp.dtype(self._dtype)).itemsize
        self.has_rows = self._is_table and len(shape) > 1 and math.prod(shape) >= _MIN_TABLE_SIZE
        if num_bytes > _MAX_LOCAL_BYTES:
            with contextlib.suppress(NotImplementedError):  # then it is made whole
                self.serving.create(self, InitialRows(initializer, shape, self._dtype))
                return
        value = np.asarray(self._convert_to_tensor(initializer(shape, dtype=self._dtype)))
        if not shape and not self.trainable:
            self.place = Unplaced(value)
        else:
            self.serving.create(self, value)

    def hold(self, value: Any) -> None:
        """Keeps a value for a step of this process."""
        if self._home.kind is VariableKind.ON_READ:
            value = np.broadcast_to(value, (self._home.strategy.num_replicas_in_sync, *value.shape))
        self.held = value

    def whole_held(self) -> np.ndarray:
        """The value that a step has written; of components their mean."""
        value = np.asarray(self.held)
        return value.mean(0) if self._home.kind is VariableKind.ON_READ else value

    def _assign_delta(self, value: Any, *, sign: int) -> Any:
        scope = current_scope()
        if scope is None and get_stateless_scope() is None:
            self.serving.assign(self, self._contribution(value), sign=sign)
            return self.value
        if scope is None:  # Keras infers shapes
            return super()._assign_delta(value, sign=sign)
        added_to = scope.outermost.added_to
        was_set = scope.has_written(self) and id(self) not in added_to
        result = super()._assign_delta(value, sign=sign)
        if not was_set:
            added_to.add(id(self))
        return result

    def assign(self, value: Any) -> Any:
        """Sets the value, by the variable's aggregation in a replica function."""
        if (scope := current_scope()) is not None:
            scope.outermost.added_to.discard(id(self))
        return super().assign(value)

    @property
    def constraint(self) -> Any:
        """None: servers update without one."""
        return None

    @constraint.setter
    def constraint(self, value: Any) -> None:
        if value is not None:
            raise NotImplementedError(
                explain(
                    f"Variable {self.path!r} has the constraint {value}.",
                    expected="variables without constraints under a ParameterServerStrategy: its "
                    "servers update parts of variables.",
                    fix="leave the constraint out, or use a regularizer.",
                )
            )

"""Keras variables on abstract devices: a shape and a dtype, and no value."""

from __future__ import annotations

from typing import Any

import jax

from stratagem.contexts import current_function_trace
from stratagem.execution.embeddings.lookups import is_table
from stratagem.keras.variables.initial_value import as_initializer
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.variables.kind import VariableKind
from stratagem.variables.registry import Home


class ValuelessVariable(DistributedVariable):
    """A Keras variable created in the scope of a `CompileOnlyStrategy`.

    A read outside of a step draws a new initial value; assignments there are dropped.
    """

    _beginning: Any = None

    @property
    def storage(self) -> Any:
        """The shape of the whole array, in any store."""
        trace = current_function_trace()
        return self.stored if trace is None else trace.load(self, self.stored)

    @storage.setter
    def storage(self, value: object) -> None:
        trace = current_function_trace()
        if trace is None:
            self.stored = value
        else:
            trace.store(self, value)

    @property
    def for_step(self) -> Any:
        """The shape of the input of a compiled step of the strategy."""
        return self.storage

    @property
    def initializer(self) -> Any:
        """The function that draws an initial value, of a shape and a dtype."""
        return self._beginning or self._initializer

    def settle(self, home: Home, value: Any) -> None:
        """Drops the value of a variable that joins the strategy, and retains its shape.

        `value` is an array, or the initializer of a variable that had no value either.
        """
        has_value = not callable(value)
        self._beginning = as_initializer(value, self._dtype)[0] if has_value else value
        self.store, self.has_rows = None, False  # of the previous strategy
        self._is_table = self._is_table or is_table(self)
        super().settle(home, value)

    def _initialize_with_initializer(self, initializer: object) -> None:
        self._beginning = initializer
        self.find_division()
        self.choose_store()
        self._direct_assign(None)

    def _direct_assign(self, value: object) -> None:
        self._require_own_replica()
        is_stacked = self._home.kind is VariableKind.ON_READ
        replicas = (self._home.strategy.num_replicas_in_sync,) if is_stacked else ()
        dtype = jax.dtypes.canonicalize_dtype(self._dtype)
        self.storage = jax.ShapeDtypeStruct((*replicas, *self._shape), dtype)

    def _global_value(self) -> Any:
        self._require_own_replica()
        return self.initializer(self._shape, dtype=self._dtype)

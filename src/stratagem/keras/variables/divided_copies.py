"""Variables whose copies are divided over the devices of their replica, by a strategy's layouts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np

from stratagem.contexts import current_function_trace
from stratagem.devices.shards import MIN_SLICED_BYTES, creating_on_host, put_slices
from stratagem.keras.variables.copied_assignments import note_assignment
from stratagem.variables.kind import VariableKind
from stratagem.variables.layouts import Division
from stratagem.variables.registry import Home
from stratagem.variables.store import Store

if TYPE_CHECKING:
    from jax.typing import DTypeLike


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
        return is_in_shards and is_shared and is_large and current_function_trace() is None

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

"""Variables whose copies are divided over the devices of their replica, by a strategy's layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from stratagem.topology.shards import creating_on_host
from stratagem.variables import Division, Home, Store, VariableKind

if TYPE_CHECKING:
    from jax.typing import DTypeLike


__all__ = ["DividedCopies"]


class DividedCopies:
    """Layout of a variable's copy over the devices of a replica.

    Keras hands `_layout` of a variable to the slots that an optimizer makes for it.
    """

    store: Store | None
    _home: Home
    _layout: Any
    _shape: tuple[int, ...]
    _dtype: Any
    path: str
    trainable: bool

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

        Args:
            initializer: of Keras.
            dtype: of the variable.
        """
        with creating_on_host(self.division is not None or self.store is not None):
            return self._convert_to_tensor(initializer(self._shape, dtype=dtype))

    def _convert_to_tensor(self, value: object, dtype: object = None) -> Any:
        above: Any = super()
        is_in_parts = self.division is not None or self.store is not None
        with creating_on_host(is_in_parts and not isinstance(value, jax.Array)):
            return above._convert_to_tensor(value, dtype=dtype)

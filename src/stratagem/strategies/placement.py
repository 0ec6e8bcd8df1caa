"""Rules for `placement`: by variable size, by layer, or for optimizer state."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

__all__ = ["AtLeastBytes", "at_least_bytes", "in_layer", "optimizer_state"]


class _Variable(Protocol):
    """The part of a Keras variable that rules read."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> Any: ...

    @property
    def path(self) -> str: ...


class _NamedLayer(Protocol):
    """The part of a Keras layer that rules read."""

    @property
    def name(self) -> str: ...


@dataclasses.dataclass(frozen=True)
class AtLeastBytes:
    """A rule that matches variables by size; it may match none.

    Example:
        >>> rule = sg.placement.AtLeastBytes(4096)
        >>> rule(sg.Variable(np.zeros((32, 32)))), rule(sg.Variable(np.zeros(32)))
        (True, False)

    Source: specific to Stratagem.
    """

    num_bytes: int

    def __call__(self, variable: _Variable) -> bool:
        """Returns True if the variable has at least `num_bytes`."""
        size = math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
        return size >= self.num_bytes


def at_least_bytes(num_bytes: int) -> Callable[[Any], bool]:
    """Returns a rule that matches variables by size; it may match none.

    Args:
        num_bytes: minimum size in bytes.

    Returns:
        A function of a variable.

    Example:
        >>> sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.at_least_bytes(2**30): "sharded"}
        ... ).num_replicas_in_sync
        2

    Source: specific to Stratagem.
    """
    return AtLeastBytes(num_bytes)


def in_layer(layer: str | _NamedLayer) -> Callable[[Any], bool]:
    """Returns a rule that matches the variables of a layer.

    Args:
        layer: a Keras layer, or its name.

    Returns:
        A function of a variable.

    Example:
        >>> sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.in_layer("users"): "central"}
        ... ).num_replicas_in_sync
        2

    Source: specific to Stratagem.
    """
    name = layer if isinstance(layer, str) else layer.name

    def is_in_layer(variable: _Variable) -> bool:
        return name in variable.path.split("/")[:-1]

    return is_in_layer


def optimizer_state(variable: _Variable) -> bool:
    """A rule that places the optimizer state of variables apart from them.

    It applies to variables on the replicas' devices or in pinned host memory, and accepts
    "mirrored", "sharded" and "pinned_host". Without it, optimizer state is stored with its
    variable.

    Args:
        variable: a variable.

    Returns:
        True for optimizer state of a variable, such as Adam's moments.

    Example:
        >>> strategy = sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.optimizer_state: "pinned_host"}
        ... )
        >>> with strategy.scope():
        ...     layer = keras.layers.Dense(64)
        ...     layer.build((None, 64))
        ...     adam = keras.optimizers.Adam()
        ...     adam.build(layer.trainable_variables)
        >>> [sg.placement.optimizer_state(one) for one in (layer.kernel, adam.variables[2])]
        [False, True]

    Source: specific to Stratagem; ZeRO-Offload in DeepSpeed.
    """
    return getattr(variable, "slot_of", None) is not None

"""Rules for the `placement` of a `HybridStrategy`: which variables are large, or of which layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["AtLeastBytes", "at_least_bytes", "in_layer"]


@dataclasses.dataclass(frozen=True)
class AtLeastBytes:
    """A rule that matches variables by their size; of a small model it need not match any.

    Args:
        num_bytes: the least size, in bytes.
    """

    num_bytes: int

    def __call__(self, variable: Any) -> bool:
        """Tells whether a variable is so large.

        Args:
            variable: of known shape and dtype.
        """
        size = math.prod(variable.shape) * np.dtype(variable.dtype).itemsize
        return size >= self.num_bytes


def at_least_bytes(num_bytes: int) -> Callable[[Any], bool]:
    """Returns a rule that matches variables by their size; it need not match any.

    Args:
        num_bytes: the least size, in bytes.

    Example:
        >>> sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.at_least_bytes(2**30): "sharded"}
        ... ).num_replicas_in_sync
        2
    """
    return AtLeastBytes(num_bytes)


def in_layer(layer: Any) -> Callable[[Any], bool]:
    """Returns a rule that matches the variables of a layer.

    Args:
        layer: a Keras layer, or its name.

    Example:
        >>> sg.HybridStrategy(
        ...     ["cpu:0", "cpu:1"], placement={sg.placement.in_layer("users"): "central"}
        ... ).num_replicas_in_sync
        2
    """
    name = layer if isinstance(layer, str) else layer.name

    def is_in_layer(variable: Any) -> bool:
        return name in variable.path.split("/")[:-1]

    return is_in_layer

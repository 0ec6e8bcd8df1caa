"""Mapping over arguments and results. Unlike in JAX, dict keys need not be sortable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# JAX's mapping takes longer for one leaf than all else.
_PLAIN = {bool, int, float, str, bytes, np.ndarray}


def map_structure(
    function: Callable[[Any], Any], value: object, is_leaf: Callable[[Any], bool] = lambda _: False
) -> Any:
    """Returns a structure with `function` applied to each leaf; dicts keep their order.

    Recurses into lists, tuples, dicts and JAX pytrees, except where `is_leaf` returns True.

    Example:
        >>> from stratagem.parameter_server.coordinator.structures import map_structure
        >>> map_structure(lambda leaf: leaf + 1, {"b": [1, None], 2: (3,)})
        {'b': [2, None], 2: (4,)}
    """
    kind: Any = type(value)
    if kind in _PLAIN or is_leaf(value):
        return function(value)
    if isinstance(value, dict) and kind is dict:
        return {key: map_structure(function, part, is_leaf) for key, part in value.items()}
    if isinstance(value, tuple | list) and (kind in (tuple, list) or hasattr(kind, "_fields")):
        parts = [map_structure(function, part, is_leaf) for part in value]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    return jax.tree.map(function, value, is_leaf=is_leaf)


def leaves_of(value: object, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Returns the leaves of a structure; see `map_structure`."""
    container: Any = value
    if type(value) in (tuple, list) and not is_leaf(value):  # most arguments; see `_PLAIN`
        return [leaf for part in container for leaf in leaves_of(part, is_leaf)]
    leaves: list[Any] = []
    map_structure(leaves.append, value, is_leaf)
    return leaves

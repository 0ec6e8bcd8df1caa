"""Values as JSON can hold them: arrays as text, numbers of NumPy as Python's."""

from __future__ import annotations

import base64
from typing import Any

import jax
import numpy as np

_ARRAY = "array in base64"


def to_json(value: object) -> Any:
    """Returns a value as lists, dicts, texts and numbers; tuples become lists.

    Args:
        value: of these and of arrays.
    """
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray | jax.Array):
        array = np.ascontiguousarray(value)
        text = base64.b64encode(array.tobytes()).decode()
        return {_ARRAY: text, "dtype": str(array.dtype), "shape": list(np.shape(value))}
    return value


def from_json(value: object) -> Any:
    """Returns what `to_json` was given, with lists for tuples.

    Args:
        value: what it returned.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        raw = np.frombuffer(base64.b64decode(value[_ARRAY]), np.dtype(value["dtype"]))
        return raw.reshape(value["shape"]).copy()
    return {key: from_json(item) for key, item in value.items()}

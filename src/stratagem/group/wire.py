"""Values of messages between the processes of a group, as JSON.

Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import re
from typing import Any

import numpy as np

from stratagem.errors import explain

_STRINGS = re.compile(r"[<>|][US]\d{1,6}")


def encode(value: object) -> Any:
    """Returns a value as JSON, for `decode`; raises TypeError for unsupported types.

    Supports None, bools, numbers, strings, bytes, NumPy arrays and scalars, and lists, tuples and
    dicts with string keys of these.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray | np.generic) and _is_numeric(value.dtype):
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {"array": [value.dtype.name, list(value.shape), data]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "US":
        rows: list[Any] = value.ravel().tolist()
        return {"strings": [value.dtype.str, list(value.shape), [encode(row) for row in rows]]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    raise TypeError(
        explain(
            f"{value!r} of type {type(value).__name__} cannot be sent to other processes.",
            expected="None, bools, numbers, strings, bytes, NumPy arrays, and lists, tuples and "
            "dicts with string keys of these. Nothing is pickled.",
            fix="convert it to these types, or send only the parts that others need.",
        )
    )


def _is_numeric(dtype: np.dtype[Any]) -> bool:
    """True for numeric dtypes, including extensions such as bfloat16."""
    is_added = dtype.kind == "V" and not dtype.name.startswith("void")
    return dtype.isnative and (dtype.kind in "biufc" or is_added)


def decode(value: object) -> Any:
    """Returns the value that `encode` received; raises ValueError for anything else."""
    try:
        return _decoded(value)
    except (AttributeError, MemoryError, OverflowError, RecursionError, TypeError) as error:
        raise ValueError(f"received no encoded value: {error}") from error


def _decoded(value: object) -> Any:
    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_decoded(item) for item in content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "array":
        name, shape, data = content
        # NumPy would parse anything else as an expression.
        dtype = np.dtype(name) if str(name).isidentifier() else None
        if dtype is None or not _is_numeric(dtype):
            raise ValueError(f"an array of {name!r} is no encoded value")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    if kind == "strings":
        name, shape, rows = content
        if not _STRINGS.fullmatch(str(name)):
            raise ValueError(f"an array of {name!r} is no encoded value")
        return np.array([_decoded(row) for row in rows], str(name)).reshape(shape)
    return {key: _decoded(item) for key, item in content.items()}

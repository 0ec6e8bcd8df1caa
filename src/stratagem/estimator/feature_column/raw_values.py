"""Features as input functions give them, as NumPy arrays on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.messages import explain

__all__ = ["as_bytes", "categorical_rows", "feature_of", "numeric_rows"]


def feature_of(features: Mapping[str, Any], key: str) -> Any:
    """Returns a feature by name.

    Raises:
        ValueError: there is none of this name, or `features` is no dict.
    """
    if not isinstance(features, Mapping):
        raise ValueError(
            explain(
                f"features is a {type(features).__name__}.",
                expected="a dict from names to arrays, whose keys the feature columns name.",
                fix=f"pass {{{key!r}: ...}}.",
            )
        )
    if key not in features:
        raise ValueError(
            explain(
                f"Feature {key!r} is not in the features {sorted(features)}.",
                expected="every feature that a column names.",
                fix=f"let the input function return {key!r}, or leave out the column.",
            )
        )
    return features[key]


def categorical_rows(value: Any, key: str) -> np.ndarray:
    """Returns a feature of strings or integers as one row an example.

    Args:
        value: array of shape (batch,) or (batch, values); or a list of values; or of lists of
            them of any lengths (the rows are padded with None).
        key: the feature's name.

    Returns:
        Array of shape (batch, values): of integers, or of objects, which are strings, bytes,
        integers or None.

    Raises:
        ValueError: more than two dimensions, or values that are no strings or integers.
    """
    array = _with_equal_rows(value)
    if array.ndim not in (1, 2):
        raise ValueError(
            explain(
                f"Feature {key!r} of a categorical column has shape {array.shape}.",
                expected="shape (batch,) or (batch, values).",
                fix="flatten what belongs to one example to one axis.",
            )
        )
    if not array.size:
        return np.zeros((len(array), array.shape[1] if array.ndim == 2 else 1), np.int32)
    rows = array.reshape(len(array), -1)
    if rows.dtype.kind in "iu":
        return rows
    if rows.dtype.kind in "US":
        return rows.astype(object)
    allowed = (str, bytes, int, np.integer)
    if rows.dtype.kind == "O" and all(x is None or isinstance(x, allowed) for x in rows.flat):
        return rows
    raise ValueError(
        explain(
            f"Feature {key!r} of a categorical column has dtype {rows.dtype}.",
            expected="strings or integers.",
            fix="put numbers into a numeric_column, and its buckets into a bucketized_column.",
        )
    )


def numeric_rows(
    value: Any, key: str, shape: tuple[int, ...], default: tuple[float, ...] | None, dtype: str
) -> np.ndarray:
    """Returns a feature of numbers as an array of shape (batch, *shape).

    Args:
        value: array or list; a list may hold None for what is missing.
        key: the feature's name.
        shape: of one example.
        default: what stands for None, one number or one a place; None if nothing may be missing.
        dtype: of the result.

    Raises:
        ValueError: values that are no numbers, of another shape, or missing without a default.
    """
    array = np.asarray(_with_equal_rows(value))
    if array.dtype == object:
        array = _without_missing(array, key, shape, default)
    if array.dtype.kind not in "biuf":
        raise ValueError(
            explain(
                f"Feature {key!r} of a numeric column has dtype {array.dtype}.",
                expected="numbers.",
                fix="use a categorical column for strings.",
            )
        )
    if array.shape[1:] != shape and not (array.ndim == 1 and shape == (1,)):
        raise ValueError(
            explain(
                f"Feature {key!r} has shape {array.shape}.",
                expected=f"shape (batch, {', '.join(map(str, shape))}), as its column says.",
                fix="give numeric_column the shape of one example.",
            )
        )
    return array.reshape(-1, *shape).astype(dtype)


def as_bytes(value: Any) -> bytes:
    """Returns what TensorFlow's string tensors hold of a string, bytes or integer."""
    return value if isinstance(value, bytes) else str(value).encode()


def _without_missing(
    array: np.ndarray, key: str, shape: tuple[int, ...], default: tuple[float, ...] | None
) -> np.ndarray:
    missing = np.asarray([value is None for value in array.flat]).reshape(array.shape)
    if not missing.any():
        defaults = 0.0
    elif default is None:
        raise ValueError(
            explain(
                f"Feature {key!r} lacks {int(missing.sum())} values.",
                expected="a number in every place, for its column has no default_value.",
                fix="pass default_value to numeric_column.",
            )
        )
    else:
        flat = np.broadcast_to(np.asarray(default), (int(np.prod(shape)),))
        defaults = flat.reshape(shape) if array.ndim > 1 else flat[0]
    try:
        return np.where(missing, defaults, array).astype(np.float64)
    except (TypeError, ValueError):
        return array.astype(str)  # the caller refuses strings, by name


def _with_equal_rows(value: Any) -> np.ndarray:
    """Returns an array, rows of unequal lengths padded with None."""
    if callable(to_list := getattr(value, "to_list", None)):  # ragged tensors and Pandas columns
        value = to_list()
    if not isinstance(value, list | tuple):
        return np.asarray(value)
    rows: list[Any] = [x.tolist() if isinstance(x, np.ndarray) else x for x in value]
    if not any(isinstance(row, list | tuple) for row in rows):
        return np.asarray(rows, dtype=object if None in rows else None)
    lists: list[list[Any]] = [list(row) if isinstance(row, list | tuple) else [row] for row in rows]
    width = max(map(len, lists))
    if all(len(row) == width for row in lists):
        holds_none = any(None in row for row in lists)
        return np.asarray(lists, dtype=object if holds_none else None)
    # Widths are rounded up, so that a compiled step meets few of them.
    width = 1 << (width - 1).bit_length()
    return np.asarray([row + [None] * (width - len(row)) for row in lists], dtype=object)

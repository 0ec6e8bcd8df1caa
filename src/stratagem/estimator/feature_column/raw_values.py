"""Raw feature values of input functions, as NumPy arrays on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.messages import explain


def feature_of(features: Mapping[str, Any], key: str) -> Any:
    """Returns a feature by name."""
    if not isinstance(features, Mapping):
        raise ValueError(
            explain(
                f"features is of type {type(features).__name__}.",
                expected="a dict from feature names to arrays.",
                fix=f"pass {{{key!r}: ...}}.",
            )
        )
    if key not in features:
        raise ValueError(
            explain(
                f"Feature {key!r} is missing from the features {sorted(features)}.",
                expected="every feature that a column reads.",
                fix=f"return {key!r} from the input function, or remove the column.",
            )
        )
    return features[key]


def categorical_rows(value: object, key: str) -> np.ndarray:
    """Returns a string or integer feature as an array of shape (batch, values).

    `value` is an array of shape (batch,) or (batch, values), or a list of values or lists. Ragged
    lists are padded with None. Elements are integers, or objects: strings, bytes, integers, None.
    """
    array = _with_equal_rows(value)
    if array.ndim not in (1, 2):
        raise ValueError(
            explain(
                f"Feature {key!r} of a categorical column has shape {array.shape}.",
                expected="shape (batch,) or (batch, values).",
                fix="flatten the values of an example to one axis.",
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
            fix="use a numeric_column for numbers, and a bucketized_column for their buckets.",
        )
    )


def numeric_rows(
    value: object, key: str, shape: tuple[int, ...], default: tuple[float, ...] | None, dtype: str
) -> np.ndarray:
    """Returns a numeric feature as an array of shape (batch, *shape).

    `default` replaces None in lists: one number or one per value; None allows no missing values.
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
                expected=f"shape (batch, {', '.join(map(str, shape))}), as its column declares.",
                fix="pass the shape of one example to numeric_column.",
            )
        )
    return array.reshape(-1, *shape).astype(dtype)


def as_bytes(value: object) -> bytes:
    """Returns a string, bytes or integer as in TensorFlow's string tensors."""
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
                f"Feature {key!r} has {int(missing.sum())} missing values.",
                expected="no missing values, since its column has no default_value.",
                fix="pass default_value to numeric_column.",
            )
        )
    else:
        flat = np.broadcast_to(np.asarray(default), (int(np.prod(shape)),))
        defaults = flat.reshape(shape) if array.ndim > 1 else flat[0]
    try:
        return np.where(missing, defaults, array).astype(np.float64)
    except (TypeError, ValueError):
        return array.astype(str)  # the caller rejects strings with a clear error


def _with_equal_rows(value: object) -> np.ndarray:
    """Returns an array, padding ragged rows with None."""
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
    # Rounding up the width limits the number of compiled shapes.
    width = 1 << (width - 1).bit_length()
    return np.asarray([row + [None] * (width - len(row)) for row in lists], dtype=object)

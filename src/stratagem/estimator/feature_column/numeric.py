"""Columns of numbers, and of the buckets into which numbers fall."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from stratagem.estimator.feature_column.columns import CategoricalColumn, DenseColumn
from stratagem.estimator.feature_column.raw_values import feature_of, numeric_rows
from stratagem.messages import explain

__all__ = ["BucketizedColumn", "NumericColumn", "bucketized_column", "numeric_column"]


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class NumericColumn(DenseColumn):
    """What `numeric_column` returns."""

    key: str
    shape: tuple[int, ...]
    default_value: tuple[float, ...] | None
    dtype: str
    normalizer_fn: Callable[[Any], Any] | None = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """The feature's name."""
        return self.key

    @property
    def size(self) -> int:
        """Numbers of one example."""
        return math.prod(self.shape)

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """The feature's name."""
        return (self.key,)

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the feature, checked, with defaults for what is missing."""
        return {self.key: self._rows(features)}

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns the numbers, normalized."""
        rows = keras.ops.convert_to_tensor(feature_of(features, self.key))
        rows = keras.ops.cast(keras.ops.reshape(rows, (-1, *self.shape)), self.dtype)
        if self.normalizer_fn is not None:
            rows = self.normalizer_fn(rows)
        return keras.ops.cast(keras.ops.reshape(rows, (-1, self.size)), "float32")

    def normalized(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the numbers, normalized, on the host."""
        rows = self._rows(features)
        if self.normalizer_fn is not None:
            rows = np.asarray(self.normalizer_fn(rows))
        return rows.reshape(-1, self.size).astype(np.float32)

    def _rows(self, features: Mapping[str, Any]) -> np.ndarray:
        value = feature_of(features, self.key)
        return numeric_rows(value, self.key, self.shape, self.default_value, self.dtype)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class BucketizedColumn(CategoricalColumn, DenseColumn):
    """What `bucketized_column` returns: categorical in crosses and linear models, else one-hot."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        """TensorFlow's name."""
        return f"{self.source_column.name}_bucketized"

    @property
    def size(self) -> int:
        """Places of the one-hot numbers."""
        return self.num_buckets

    @property
    def num_buckets(self) -> int:
        """Buckets of all numbers of an example together."""
        return (len(self.boundaries) + 1) * self.source_column.size

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """The feature's name."""
        return self.source_column.encoded_names

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the numbers: their buckets are found on the device."""
        return self.source_column.encode(features)

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the buckets on the host, for crosses."""
        boundaries = np.asarray(self.boundaries, np.float32)
        buckets = np.digitize(self.source_column.normalized(features), boundaries)
        return (buckets + self._first_buckets()).astype(np.int32)

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the buckets, found on the device."""
        boundaries = np.asarray(self.boundaries, np.float32)
        buckets = keras.ops.digitize(self.source_column.numbers(features), boundaries)
        return keras.ops.cast(buckets, "int32") + self._first_buckets(), None

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns the one-hot numbers."""
        ids, _ = self.ids_and_weights(features)
        return keras.ops.sum(keras.ops.one_hot(ids, self.num_buckets, dtype="float32"), axis=-2)

    def _first_buckets(self) -> np.ndarray:
        return np.arange(self.source_column.size, dtype=np.int32) * (len(self.boundaries) + 1)


def numeric_column(
    key: str,
    shape: int | Sequence[int] = (1,),
    default_value: float | Sequence[float] | None = None,
    dtype: str = "float32",
    normalizer_fn: Callable[[Any], Any] | None = None,
) -> NumericColumn:
    """Says that a feature is numbers.

    Args:
        key: the feature's name.
        shape: of the numbers of one example.
        default_value: stands for None in lists; one number, or one a place.
        dtype: of the numbers as they are read; a model sees float32.
        normalizer_fn: called with the numbers, shape (batch, *shape), on the device.

    Returns:
        The column.

    Raises:
        ValueError: a shape that is not positive, a dtype of no numbers, or defaults of another
            size.
        TypeError: `normalizer_fn` cannot be called.

    Example:
        >>> sg.feature_column.numeric_column("age", normalizer_fn=lambda x: x / 100.0).name
        'age'

    Source: TF 2.21 feature_column_v2.py, numeric_column.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    if normalizer_fn is not None and not callable(normalizer_fn):
        raise TypeError(
            explain(
                f"numeric_column({key!r}) received normalizer_fn={normalizer_fn!r}.",
                expected="a function of an array.",
                fix="pass a function such as lambda x: x / 100.0.",
            )
        )
    _check_numbers(key, sizes, dtype)
    default = _default(key, sizes, default_value)
    return NumericColumn(key, sizes, default, np.dtype(dtype).name, normalizer_fn)


def _check_numbers(key: str, sizes: tuple[int, ...], dtype: str) -> None:
    if any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ValueError(
            explain(
                f"numeric_column({key!r}) received shape={sizes}.",
                expected="positive integers.",
                fix="pass the shape of one example, such as (3,).",
            )
        )
    if np.dtype(dtype).kind not in "iuf":
        raise ValueError(
            explain(
                f"numeric_column({key!r}) received dtype={dtype!r}.",
                expected="integers or floating-point numbers.",
                fix="leave dtype out.",
            )
        )


def _default(key: str, sizes: tuple[int, ...], given: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    default = tuple(float(number) for number in np.ravel(given))
    if len(default) not in (1, math.prod(sizes)):
        raise ValueError(
            explain(
                f"numeric_column({key!r}) received default_value={given!r}.",
                expected=f"one number, or {math.prod(sizes)} for shape {sizes}.",
                fix="pass one number.",
            )
        )
    return default


def bucketized_column(
    source_column: NumericColumn, boundaries: Sequence[float]
) -> BucketizedColumn:
    """Turns numbers into the buckets into which they fall.

    Args:
        source_column: column of one number an example, or of a vector of them.
        boundaries: in rising order; [0., 1.] makes the buckets (-inf, 0), [0, 1) and [1, inf).

    Returns:
        The column.

    Raises:
        ValueError: no numeric column of at most one dimension, or boundaries that do not rise.

    Example:
        >>> age = sg.feature_column.numeric_column("age")
        >>> sg.feature_column.bucketized_column(age, [18, 65]).num_buckets
        3

    Source: TF 2.21 feature_column_v2.py, bucketized_column.
    """
    if not isinstance(source_column, NumericColumn) or len(source_column.shape) > 1:
        raise ValueError(
            explain(
                f"bucketized_column received {source_column!r}.",
                expected="a numeric_column of one dimension.",
                fix="pass sg.feature_column.numeric_column(key).",
            )
        )
    limits = tuple(float(limit) for limit in boundaries)
    if not limits or any(left >= right for left, right in itertools.pairwise(limits)):
        raise ValueError(
            explain(
                f"bucketized_column received boundaries={list(boundaries)!r}.",
                expected="at least one number, each larger than the one before.",
                fix="sort them and leave out doubles.",
            )
        )
    return BucketizedColumn(source_column, limits)

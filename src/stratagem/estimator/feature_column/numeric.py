"""Numeric and bucketized columns."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.feature_column.columns import (
    CategoricalColumn,
    DenseColumn,
    feature_of,
    numeric_rows,
)

if TYPE_CHECKING:
    from jax.typing import ArrayLike


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class NumericColumn(DenseColumn):
    """Column created by `numeric_column`."""

    key: str
    shape: tuple[int, ...]
    default_value: tuple[float, ...] | None
    dtype: str
    normalizer_fn: Callable[[Any], Any] | None = dataclasses.field(repr=False)

    @property
    def name(self) -> str:
        """Name of the feature."""
        return self.key

    @property
    def size(self) -> int:
        """Number of values per example."""
        return math.prod(self.shape)

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Name of the feature."""
        return (self.key,)

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the checked feature, with defaults for missing values."""
        return {self.key: self._rows(features)}

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns the normalized numbers on the device."""
        rows = keras.ops.convert_to_tensor(feature_of(features, self.key))
        rows = keras.ops.cast(keras.ops.reshape(rows, (-1, *self.shape)), self.dtype)
        if self.normalizer_fn is not None:
            rows = self.normalizer_fn(rows)
        return keras.ops.cast(keras.ops.reshape(rows, (-1, self.size)), "float32")

    def normalized(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the normalized numbers on the host."""
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
    """Column created by `bucketized_column`: ids in crosses and linear models, else one-hot."""

    source_column: NumericColumn
    boundaries: tuple[float, ...]

    @property
    def name(self) -> str:
        """Column name, the same as in TensorFlow."""
        return f"{self.source_column.name}_bucketized"

    @property
    def size(self) -> int:
        """Size of the one-hot vector."""
        return self.num_buckets

    @property
    def num_buckets(self) -> int:
        """Number of buckets of all values of an example."""
        return (len(self.boundaries) + 1) * self.source_column.size

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Name of the feature."""
        return self.source_column.encoded_names

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the numbers; the device computes the buckets."""
        return self.source_column.encode(features)

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the buckets on the host, for crosses."""
        boundaries = np.asarray(self.boundaries, np.float32)
        buckets = np.digitize(self.source_column.normalized(features), boundaries)
        return (buckets + self._first_buckets()).astype(np.int32)

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the buckets on the device."""
        boundaries = np.asarray(self.boundaries, np.float32)
        buckets = keras.ops.digitize(self.source_column.numbers(features), boundaries)
        return keras.ops.cast(buckets, "int32") + self._first_buckets(), None

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns the one-hot buckets."""
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
    """Returns a column that reads a numeric feature.

    Args:
        key: the name of the feature.
        shape: the shape of one example's values.
        default_value: replaces None in lists; one number, or one per value.
        dtype: the dtype to read the feature in; models receive float32.
        normalizer_fn: a function of the numbers, shape (batch, *shape), called on the device.

    Returns:
        A dense column of shape (batch, prod(shape)).

    Raises:
        ValueError: if the shape is not positive, the dtype is not numeric, or `default_value` has
            another size.
        TypeError: if `normalizer_fn` is not callable.

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
                fix="pass a function, for example lambda x: x / 100.0.",
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
                fix="pass the shape of one example, for example (3,).",
            )
        )
    if np.dtype(dtype).kind not in "iuf":
        raise ValueError(
            explain(
                f"numeric_column({key!r}) received dtype={dtype!r}.",
                expected="an integer or floating-point dtype.",
                fix="omit dtype to use float32.",
            )
        )


def _default(
    key: str, sizes: tuple[int, ...], value: ArrayLike | Sequence[float] | None
) -> tuple[float, ...] | None:
    if value is None:
        return None
    default = tuple(float(number) for number in np.ravel(value))
    if len(default) not in (1, math.prod(sizes)):
        raise ValueError(
            explain(
                f"numeric_column({key!r}) received default_value={value!r}.",
                expected=f"one number, or {math.prod(sizes)} numbers for shape {sizes}.",
                fix="pass one number.",
            )
        )
    return default


def bucketized_column(
    source_column: NumericColumn, boundaries: Sequence[float]
) -> BucketizedColumn:
    """Returns a column that maps numbers to buckets.

    Args:
        source_column: a numeric column of one number or one vector per example.
        boundaries: increasing numbers. [0., 1.] gives the buckets (-inf, 0), [0, 1) and [1, inf).

    Returns:
        A column that is both dense and categorical.

    Raises:
        ValueError: if the source is not a numeric column of at most one axis, or the boundaries do
            not increase.

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
                expected="a numeric_column of at most one axis.",
                fix="pass sg.feature_column.numeric_column(key).",
            )
        )
    limits = tuple(float(limit) for limit in boundaries)
    if not limits or any(left >= right for left, right in itertools.pairwise(limits)):
        raise ValueError(
            explain(
                f"bucketized_column received boundaries={list(boundaries)!r}.",
                expected="at least one number, in strictly increasing order.",
                fix="sort them and remove duplicates.",
            )
        )
    return BucketizedColumn(source_column, limits)

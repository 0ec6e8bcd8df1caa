"""Base classes of feature columns, and encode_features.

Devices cannot hold strings. A column's `encode` turns raw features into numeric arrays on the
host, and a Keras layer reads these on the device. Categorical columns become ids: int32 arrays
of shape (batch, values), where -1 means no value.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.checks import check_type

if TYPE_CHECKING:
    from jax.typing import ArrayLike, DTypeLike


# Raw feature values of input functions, as NumPy arrays on the host.


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


@dataclasses.dataclass(frozen=True)
class FeatureColumn(abc.ABC):
    """Conversion of one or more features to model inputs."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Column name, the same as in TensorFlow."""

    @abc.abstractmethod
    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Converts raw features to numeric arrays on the host."""

    @property
    @abc.abstractmethod
    def encoded_names(self) -> tuple[str, ...]:
        """Names of the arrays that `encode` returns."""

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments for Keras serialization."""
        return {
            field.name: keras.saving.serialize_keras_object(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Creates a column from its config."""
        read = {key: keras.saving.deserialize_keras_object(value) for key, value in config.items()}
        # JSON turns tuples into lists, which are not hashable.
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in read.items()})


class DenseColumn(FeatureColumn):
    """Column that becomes numbers on the device, one row per example."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Number of values per example."""

    @abc.abstractmethod
    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns a float32 array of shape (batch, size), on the device."""


class CategoricalColumn(FeatureColumn):
    """Column that becomes ids on the device."""

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """Upper bound of ids, exclusive."""

    @abc.abstractmethod
    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns ids on the host: int32, shape (batch, values), -1 for no value."""

    @property
    def encoded_name(self) -> str:
        """Name of the encoded ids, unique to this column's settings."""
        content = f"{type(self).__name__} {self!r}".encode()
        return f"{self.name}/ids_{hashlib.blake2s(content, digest_size=4).hexdigest()}"

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Name of the encoded ids."""
        return (self.encoded_name,)

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the ids under their encoded name."""
        return {self.encoded_name: self.ids(features)}

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns ids and weights on the device; weights are None unless the column is weighted."""
        return feature_of(features, self.encoded_name), None


@dataclasses.dataclass(frozen=True)
class KeyedCategoricalColumn(CategoricalColumn):
    """Categorical column of a single feature."""

    key: str

    @property
    def name(self) -> str:
        """Name of the feature."""
        return self.key


def encode_features(
    features: Mapping[str, Any], feature_columns: Iterable[FeatureColumn]
) -> dict[str, np.ndarray]:
    """Encodes a batch on the host: vocabularies, hashes, crosses and padding.

    Pre-made estimators call it themselves. For a `model_fn` or a Keras model with `DenseFeatures`
    or `LinearModel`, call it in the input function.

    Args:
        features: a dict of a batch's features: arrays or lists of strings or numbers. Several
            values per example are rows padded with '' or -1, or lists of different lengths, which
            are padded to the next power of two of the longest.
        feature_columns: all columns of the model.

    Returns:
        A dict of the NumPy arrays that the columns read. Features without a column are dropped.

    Raises:
        ValueError: if a feature is missing or has the wrong type, or two columns share a name or
            read a feature differently.

    Example:
        >>> color = sg.feature_column.categorical_column_with_vocabulary_list("color", ["r", "g"])
        >>> columns = [sg.feature_column.indicator_column(color)]
        >>> list(sg.feature_column.encode_features({"color": ["g", "r"]}, columns).values())
        [array([[1],
               [0]], dtype=int32)]

    Source: TF 2.21 feature_column_v2.py, DenseFeatures, which encodes in the graph.
    """
    return encode_groups(features, [feature_columns])


def encode_groups(
    features: Mapping[str, Any], groups: Iterable[Iterable[FeatureColumn]]
) -> dict[str, np.ndarray]:
    """Encodes a batch for the columns of several layers, like `encode_features`."""
    encoded: dict[str, np.ndarray] = {}
    for column in dict.fromkeys(column for group in groups for column in check_columns(group)):
        for name, array in column.encode(features).items():
            _check_same(name, encoded.setdefault(name, array), array)
    return encoded


def _check_same(name: str, first: np.ndarray, second: np.ndarray) -> None:
    with_nan = first.dtype.kind == "f"
    if first.dtype != second.dtype or not np.array_equal(first, second, equal_nan=with_nan):
        raise ValueError(
            explain(
                f"Two feature columns read {name!r} differently.",
                expected="a single column that reads the feature.",
                fix="create the source column once and use it in both.",
            )
        )


def check_columns(
    feature_columns: Iterable[FeatureColumn] | FeatureColumn,
) -> list[FeatureColumn]:
    """Returns columns sorted by name."""
    columns: Sequence[Any] = (
        [feature_columns] if isinstance(feature_columns, FeatureColumn) else list(feature_columns)
    )
    wrong = [column for column in columns if not isinstance(column, FeatureColumn)]
    if wrong or not columns:
        raise ValueError(
            explain(
                f"feature_columns contains {wrong[0]!r}." if wrong else "feature_columns is empty.",
                expected="columns created by sg.feature_column.",
                fix="pass sg.feature_column.numeric_column(key), for example.",
            )
        )
    ordered = sorted(columns, key=lambda column: column.name)
    for first, second in itertools.pairwise(ordered):
        if first.name == second.name:
            raise ValueError(
                explain(
                    f"Two feature columns are named {first.name!r}: {first} and {second}.",
                    expected="each column once.",
                    fix="remove one of them.",
                )
            )
    return ordered


# Numeric and bucketized columns.


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
    if normalizer_fn is not None:
        check_type("normalizer_fn", normalizer_fn, callable, "a function of an array")
    is_shape = all(isinstance(size, int) and size > 0 for size in sizes)
    if not is_shape or np.dtype(dtype).kind not in "iuf":
        raise ValueError(
            explain(
                f"numeric_column({key!r}) received shape={sizes} and dtype={dtype!r}.",
                expected="positive integers, and an integer or floating-point dtype.",
                fix="pass the shape of one example, for example (3,), and omit dtype for float32.",
            )
        )
    default = _default(key, sizes, default_value)
    return NumericColumn(key, sizes, default, np.dtype(dtype).name, normalizer_fn)


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


# Weighted categorical columns: values with weights from another feature.


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class WeightedCategoricalColumn(CategoricalColumn):
    """Column created by `weighted_categorical_column`."""

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: str

    @property
    def name(self) -> str:
        """Column name, the same as in TensorFlow."""
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def num_buckets(self) -> int:
        """Upper bound of ids, exclusive."""
        return self.categorical_column.num_buckets

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Names of the ids and the weights."""
        return self.encoded_name, f"{self.encoded_name}_weights"

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the ids of the categorical column."""
        return self.categorical_column.ids(features)

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the ids and their weights."""
        ids = self.ids(features)
        value = feature_of(features, self.weight_feature_key)
        if isinstance(value, list | tuple):  # lists may be ragged, like the values
            value = [list(np.ravel(row)) + [0.0] * (ids.shape[1] - np.size(row)) for row in value]
        value = np.asarray(value)
        shape = (1,) if value.ndim == 1 else value.shape[1:]
        weights = numeric_rows(value, self.weight_feature_key, shape, None, self.dtype)
        if weights.shape != ids.shape:
            raise ValueError(
                explain(
                    f"Feature {self.weight_feature_key!r} has shape {weights.shape}.",
                    expected=f"one weight per value, shape {ids.shape}.",
                    fix="use the same shape for values and weights.",
                )
            )
        weights = weights.astype(np.float32)
        return dict(zip(self.encoded_names, (ids, weights), strict=True))

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns ids and weights on the device."""
        ids, weights = (feature_of(features, name) for name in self.encoded_names)
        return ids, weights


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: DTypeLike = "float32"
) -> WeightedCategoricalColumn:
    """Returns a categorical column with a weight for each value.

    Args:
        categorical_column: a column of one or more values per example.
        weight_feature_key: the name of a feature with one weight per value.
        dtype: the dtype of the weights.

    Returns:
        A categorical column.

    Raises:
        ValueError: if the column is not categorical, or the dtype is not numeric.

    Example:
        >>> word = sg.feature_column.categorical_column_with_identity("word", 10)
        >>> sg.feature_column.weighted_categorical_column(word, "frequency").name
        'word_weighted_by_frequency'

    Source: TF 2.21 feature_column_v2.py, weighted_categorical_column.
    """
    wrong_dtype = np.dtype(dtype).kind not in "iuf"
    if not isinstance(categorical_column, CategoricalColumn) or wrong_dtype:
        raise ValueError(
            explain(
                f"weighted_categorical_column received {categorical_column!r} and dtype={dtype!r}.",
                expected="a categorical column and a numeric dtype.",
                fix="pass a categorical_column_with_* column, and omit dtype.",
            )
        )
    return WeightedCategoricalColumn(categorical_column, weight_feature_key, np.dtype(dtype).name)

"""Feature columns as data: what each reads on the host, and what it becomes on the device.

Devices cannot hold strings. A column's `encode` turns raw features into numeric arrays on the
host, and a Keras layer reads these on the device. Categorical columns become ids: int32 arrays
of shape (batch, values), where -1 means no value.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Self

import jax
import keras
import numpy as np

from stratagem.errors import check_type, invalid
from stratagem.parameter_server.fingerprints import concatenated_fingerprint, fingerprint

Combiner = Literal["mean", "sqrtn", "sum"]

# Raw feature values of input functions, as NumPy arrays on the host.


def feature_of(features: Mapping[str, Any], key: str) -> Any:
    """Returns a feature by name."""
    wanted = "a dict from feature names to arrays"
    check_type("features", features, Mapping, wanted, error=ValueError)
    if key not in features:
        raise invalid(
            f"Feature {key!r} is missing from the features {sorted(features)}.",
            "every feature that a column reads.",
            f"return {key!r} from the input function, or remove the column.",
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
            f"Feature {key!r} of a categorical column has shape {array.shape}, not (batch,) or "
            "(batch, values)."
        )
    if not array.size:
        return np.zeros((len(array), array.shape[1] if array.ndim == 2 else 1), np.int32)
    rows = array.reshape(len(array), -1)
    if rows.dtype.kind in "iu":
        return rows
    if rows.dtype.kind in "US":
        return rows.astype(object)
    allowed = (str, bytes, int, np.integer, type(None))
    if rows.dtype.kind != "O" or not all(isinstance(one, allowed) for one in rows.flat):
        raise invalid(
            f"Feature {key!r} of a categorical column has dtype {rows.dtype}.",
            "strings or integers.",
            "use a numeric_column for numbers, and a bucketized_column for their buckets.",
        )
    return rows


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
            f"Feature {key!r} of a numeric column has dtype {array.dtype}: use a categorical one."
        )
    if array.shape[1:] != shape and not (array.ndim == 1 and shape == (1,)):
        raise invalid(
            f"Feature {key!r} has shape {array.shape}.",
            f"shape (batch, {', '.join(map(str, shape))}), as its column declares.",
            "pass the shape of one example to numeric_column.",
        )
    return array.reshape(-1, *shape).astype(dtype)


def as_bytes(value: object) -> bytes:
    """Returns a string, bytes or integer as in TensorFlow's string tensors."""
    return value if isinstance(value, bytes) else str(value).encode()


def _without_missing(
    array: np.ndarray, key: str, shape: tuple[int, ...], default: tuple[float, ...] | None
) -> np.ndarray:
    missing = np.asarray([value is None for value in array.flat]).reshape(array.shape)
    defaults: Any = 0.0
    if missing.any():
        if default is None:
            raise invalid(
                f"Feature {key!r} has {int(missing.sum())} missing values.",
                "no missing values, since its column has no default_value.",
                "pass default_value to numeric_column.",
            )
        flat = np.broadcast_to(np.asarray(default), (math.prod(shape),))
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


def check_columns(feature_columns: Iterable[FeatureColumn] | FeatureColumn) -> list[FeatureColumn]:
    """Returns columns sorted by name."""
    columns: Sequence[Any] = (
        [feature_columns] if isinstance(feature_columns, FeatureColumn) else list(feature_columns)
    )
    wrong = [column for column in columns if not isinstance(column, FeatureColumn)]
    if wrong or not columns:
        given = f"contains {wrong[0]!r}" if wrong else "is empty"
        raise ValueError(f"feature_columns {given}: pass columns of sg.feature_column.")
    ordered = sorted(columns, key=lambda column: column.name)
    for first, second in itertools.pairwise(ordered):
        if first.name == second.name:
            raise ValueError(
                f"Two feature columns are named {first.name!r}, remove one: {first} and {second}."
            )
    return ordered


def encode_groups(
    features: Mapping[str, Any], groups: Iterable[Iterable[FeatureColumn]]
) -> dict[str, np.ndarray]:
    """Encodes a batch for the columns of several layers, like `encode_features`."""
    encoded: dict[str, np.ndarray] = {}
    for column in dict.fromkeys(column for group in groups for column in check_columns(group)):
        for name, array in column.encode(features).items():
            first = encoded.setdefault(name, array)
            with_nan = first.dtype.kind == "f"
            if first.dtype != array.dtype or not np.array_equal(first, array, equal_nan=with_nan):
                raise ValueError(
                    f"Two feature columns read {name!r} differently: create the source column "
                    "once and use it in both."
                )
    return encoded


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
        value = feature_of(features, self.key)
        rows = numeric_rows(value, self.key, self.shape, self.default_value, self.dtype)
        return {self.key: rows}

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns the normalized numbers on the device."""
        rows = keras.ops.convert_to_tensor(feature_of(features, self.key))
        rows = keras.ops.cast(keras.ops.reshape(rows, (-1, *self.shape)), self.dtype)
        if self.normalizer_fn is not None:
            rows = self.normalizer_fn(rows)
        return keras.ops.cast(keras.ops.reshape(rows, (-1, self.size)), "float32")

    def normalized(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the normalized numbers on the host."""
        rows = self.encode(features)[self.key]
        if self.normalizer_fn is not None:
            rows = np.asarray(self.normalizer_fn(rows))
        return rows.reshape(-1, self.size).astype(np.float32)


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
        return self._shifted(np, self.source_column.normalized(features)).astype(np.int32)

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns the buckets on the device."""
        shifted = self._shifted(keras.ops, self.source_column.numbers(features))
        return keras.ops.cast(shifted, "int32"), None

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns the one-hot buckets."""
        ids, _ = self.ids_and_weights(features)
        return keras.ops.sum(keras.ops.one_hot(ids, self.num_buckets, dtype="float32"), axis=-2)

    def _shifted(self, ops: Any, numbers: Any) -> Any:
        """Returns buckets, which differ for each value of an example."""
        buckets = ops.digitize(numbers, np.asarray(self.boundaries, np.float32))
        first = np.arange(self.source_column.size, dtype=np.int32) * (len(self.boundaries) + 1)
        return buckets + first


# Categorical columns of one feature: ids, vocabularies and hashes.


@dataclasses.dataclass(frozen=True)
class KeyedCategoricalColumn(CategoricalColumn):
    """Categorical column of a single feature."""

    key: str

    @property
    def name(self) -> str:
        """Name of the feature."""
        return self.key

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the id of each value."""
        rows = categorical_rows(feature_of(features, self.key), self.key)
        return np.asarray(self._ids_of(rows), np.int32).reshape(rows.shape)

    @abc.abstractmethod
    def _ids_of(self, rows: np.ndarray) -> Any:
        """Returns the ids of integers, or of objects: strings, bytes, integers, None."""


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class IdentityCategoricalColumn(KeyedCategoricalColumn):
    """Column created by `categorical_column_with_identity`."""

    number_buckets: int
    default_value: int | None

    @property
    def num_buckets(self) -> int:
        """Upper bound of ids, exclusive."""
        return self.number_buckets

    def _ids_of(self, rows: np.ndarray) -> Any:
        """Returns the feature, with the default for ids out of range."""
        if rows.dtype == object:
            if any(isinstance(value, str | bytes) for value in rows.flat):
                raise ValueError(f"Feature {self.key!r} of an identity column contains strings.")
            ids = [-1 if value is None else value for value in rows.flat]
            rows = np.asarray(ids, np.int64).reshape(rows.shape)
        outside = (rows != -1) & ((rows < 0) | (rows >= self.num_buckets))
        if outside.any() and self.default_value is None:
            raise invalid(
                f"Feature {self.key!r} contains {int(rows[outside][0])}.",
                f"0 <= id < num_buckets={self.num_buckets}, or -1 for no value.",
                "pass default_value to replace ids that are out of range.",
            )
        return np.where(outside, -1 if self.default_value is None else self.default_value, rows)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class VocabularyCategoricalColumn(KeyedCategoricalColumn):
    """Column with a vocabulary of strings or integers."""

    vocabulary: tuple[str | int, ...]
    default_value: int
    num_oov_buckets: int

    @property
    def num_buckets(self) -> int:
        """Number of words and out-of-vocabulary buckets."""
        return len(self.vocabulary) + self.num_oov_buckets

    @functools.cached_property
    def _ids_by_word(self) -> dict[Any, int]:
        return {_as_word(word): index for index, word in enumerate(self.vocabulary)}

    def _ids_of(self, rows: np.ndarray) -> Any:
        words = [_as_word(value) for value in rows.ravel().tolist()]
        kind = type(_as_word(self.vocabulary[0]))
        if any(word is not None and type(word) is not kind for word in words):
            raise ValueError(
                f"Feature {self.key!r} and its vocabulary of {kind.__name__} have different types."
            )
        return [self._id_of(word) for word in words]

    def _id_of(self, word: object) -> int:
        if word is None or word in (b"", -1):
            return -1
        known_id = self._ids_by_word.get(word)
        if known_id is not None:
            return known_id
        if self.num_oov_buckets:
            return len(self.vocabulary) + fingerprint(as_bytes(word)) % self.num_oov_buckets
        return self.default_value


def _as_word(value: object) -> Any:
    return value.encode() if isinstance(value, str) else value


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class HashedCategoricalColumn(KeyedCategoricalColumn):
    """Column created by `categorical_column_with_hash_bucket`."""

    hash_bucket_size: int

    @property
    def num_buckets(self) -> int:
        """Upper bound of ids, exclusive."""
        return self.hash_bucket_size

    def _ids_of(self, rows: np.ndarray) -> Any:
        """Returns fingerprints of strings, or of integers in digits, modulo the buckets."""
        return [
            -1
            if value is None or value in ("", b"", -1)
            else fingerprint(as_bytes(value)) % self.hash_bucket_size
            for value in rows.ravel().tolist()
        ]


# Columns of several features: crosses, and values with weights.


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class CrossedColumn(CategoricalColumn):
    """Column created by `crossed_column`."""

    keys: tuple[str | CategoricalColumn, ...]
    hash_bucket_size: int
    hash_key: int

    @property
    def name(self) -> str:
        """Sorted names of the crossed features."""
        names = (key if isinstance(key, str) else key.name for key in self.leaves)
        return "_X_".join(sorted(names))

    @property
    def num_buckets(self) -> int:
        """Upper bound of ids, exclusive."""
        return self.hash_bucket_size

    @property
    def leaves(self) -> list[str | CategoricalColumn]:
        """Crossed columns, then feature names; nested crosses are flattened."""
        parts = (key.leaves if isinstance(key, CrossedColumn) else [key] for key in self.keys)
        # TensorFlow hashes sparse inputs before dense ones.
        return sorted(itertools.chain(*parts), key=lambda leaf: isinstance(leaf, str))

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns a hash of each combination of values, the last feature varying fastest."""
        columns = [_fingerprints(leaf, features) for leaf in self.leaves]
        sizes = [*map(len, columns)]
        if len(set(sizes)) != 1:
            raise ValueError(
                f"The features of {self.name!r} have {sizes} examples: the same in all."
            )
        crosses = [
            [self._cross(values) for values in itertools.product(*rows)]
            for rows in zip(*columns, strict=True)
        ]
        return np.asarray(crosses, np.int32).reshape(len(crosses), -1)

    def _cross(self, values: Sequence[int | None]) -> int:
        present = [value for value in values if value is not None]
        if len(present) != len(values):
            return -1
        hashed = functools.reduce(concatenated_fingerprint, present, self.hash_key)
        return hashed % self.hash_bucket_size


def _fingerprints(leaf: str | CategoricalColumn, features: Mapping[str, Any]) -> list[list[Any]]:
    """Returns each value's 64 bits: fingerprints of strings, integers as they are."""
    if isinstance(leaf, str):
        rows = categorical_rows(feature_of(features, leaf), leaf)
        return [[_bits(value) for value in row] for row in rows.tolist()]
    return [[None if id_ < 0 else id_ for id_ in row] for row in leaf.ids(features).tolist()]


def _bits(value: object) -> int | None:
    if value is None:
        return None
    return value % (1 << 64) if isinstance(value, int) else fingerprint(as_bytes(value))


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
                f"Feature {self.weight_feature_key!r} has shape {weights.shape}, not {ids.shape}, "
                "one weight per value."
            )
        return dict(zip(self.encoded_names, (ids, weights.astype(np.float32)), strict=True))

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns ids and weights on the device."""
        ids, weights = (feature_of(features, name) for name in self.encoded_names)
        return ids, weights


# Indicator and embedding columns: counts of ids, and trained rows per id.


@dataclasses.dataclass(frozen=True)
class _CategoricalWrapper(DenseColumn):
    categorical_column: CategoricalColumn

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Names of the categorical column's arrays."""
        return self.categorical_column.encoded_names

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Encodes the categorical column."""
        return self.categorical_column.encode(features)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class IndicatorColumn(_CategoricalWrapper):
    """Column created by `indicator_column`."""

    @property
    def name(self) -> str:
        """Column name, the same as in TensorFlow."""
        return f"{self.categorical_column.name}_indicator"

    @property
    def size(self) -> int:
        """One value per id."""
        return self.categorical_column.num_buckets

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns the count of each id, or the sum of its weights."""
        ids, weights = self.categorical_column.ids_and_weights(features)
        rows: Any = keras.ops.one_hot(ids, self.size, dtype="float32")
        if weights is not None:
            rows = rows * keras.ops.expand_dims(weights, -1)
        return keras.ops.sum(rows, axis=-2)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(_CategoricalWrapper):
    """Column created by `embedding_column` and `shared_embeddings`."""

    dimension: int
    combiner: Combiner
    initializer: Any
    max_norm: float | None
    trainable: bool
    shared_name: str | None = None

    @property
    def name(self) -> str:
        """Column name, the same as in TensorFlow."""
        suffix = "embedding" if self.shared_name is None else "shared_embedding"
        return f"{self.categorical_column.name}_{suffix}"

    @property
    def table_name(self) -> str:
        """Name of the table, common to all columns that share it."""
        return self.shared_name or self.name

    @property
    def size(self) -> int:
        """Size of a row of the table."""
        return self.dimension

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Is not used: see `rows`."""
        raise NotImplementedError("The rows of an embedding come from its layer's table.")

    def table(self) -> keras.layers.Embedding:
        """Creates an embedding layer for the table."""
        initializer: Any = self.initializer
        if initializer is None:
            deviation = 1 / math.sqrt(self.dimension)
            initializer = keras.initializers.TruncatedNormal(stddev=deviation)
        return keras.layers.Embedding(
            self.categorical_column.num_buckets,
            self.dimension,
            embeddings_initializer=initializer,
            trainable=self.trainable,
            name=self.table_name,
        )

    def rows(self, features: Mapping[str, Any], table: keras.layers.Embedding) -> Any:
        """Returns combined rows, float32, shape (batch, dimension); zeros without values."""
        ids, weights = self.categorical_column.ids_and_weights(features)
        return combine_rows(table, ids, weights, self.combiner, self.max_norm)


def combine_rows(
    table: Callable[[Any], Any],
    ids: jax.Array | np.ndarray,
    weights: jax.Array | np.ndarray | None,
    combiner: str,
    max_norm: float | None = None,
) -> Any:
    """Looks up and combines the rows of each example's ids.

    `ids` are ints of shape (batch, values), -1 for no value. `weights` have the same shape, or are
    None for ones; non-positive weights count only in sums. Returns shape (batch, dimension).

    Source: TF 2.21 embedding_ops.py, safe_embedding_lookup_sparse.
    """
    ops: Any = keras.ops
    ids = ops.convert_to_tensor(ids)
    rows = ops.cast(table(ops.maximum(ids, 0)), "float32")
    if max_norm is not None:
        squares = ops.sum(rows * rows, axis=-1, keepdims=True)
        # sqrt has no gradient at 0, where rows need no scaling anyway.
        norms = ops.sqrt(ops.where(squares > 0.0, squares, 1.0))
        rows = rows * (max_norm / ops.maximum(norms, max_norm))
    present = ops.cast(ids >= 0, "float32")
    numbers = present if weights is None else present * ops.cast(weights, "float32")
    if combiner != "sum":
        numbers = ops.relu(numbers)
    total = ops.sum(rows * ops.expand_dims(numbers, -1), axis=-2)
    if combiner == "sum":
        return total
    divisor = ops.sum(numbers if combiner == "mean" else numbers * numbers, axis=-1, keepdims=True)
    divisor = ops.where(divisor > 0.0, divisor, 1.0)
    return total / (divisor if combiner == "mean" else ops.sqrt(divisor))

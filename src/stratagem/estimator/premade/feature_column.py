"""Feature columns: conversion of raw features to model inputs; the names of `sg.feature_column`."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import keras
import numpy as np
from jax.core import Tracer

from stratagem.errors import check_choice, check_number, check_type, invalid
from stratagem.estimator.premade.columns import (
    BucketizedColumn,
    CategoricalColumn,
    Combiner,
    CrossedColumn,
    DenseColumn,
    EmbeddingColumn,
    FeatureColumn,
    HashedCategoricalColumn,
    IdentityCategoricalColumn,
    IndicatorColumn,
    NumericColumn,
    VocabularyCategoricalColumn,
    WeightedCategoricalColumn,
    check_columns,
    combine_rows,
    encode_groups,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike

__all__ = [
    "DenseFeatures",
    "LinearModel",
    "bucketized_column",
    "categorical_column_with_hash_bucket",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
    "crossed_column",
    "embedding_column",
    "encode_features",
    "indicator_column",
    "numeric_column",
    "shared_embeddings",
    "weighted_categorical_column",
]

_COMBINERS = ("mean", "sqrtn", "sum")
_DEFAULT_HASH_KEY = 0xDECAFCAFFE


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


# Columns of numbers.


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

    Example:
        >>> sg.feature_column.numeric_column("age", normalizer_fn=lambda x: x / 100.0).name
        'age'

    Source: TF 2.21 feature_column_v2.py, numeric_column.
    """
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    default = None if default_value is None else tuple(map(float, np.ravel(default_value)))
    is_default = default is None or len(default) in (1, math.prod(sizes))
    if min(sizes, default=1) < 1 or np.dtype(dtype).kind not in "iuf" or not is_default:
        raise invalid(
            f"numeric_column received shape={sizes}, {dtype=} and {default_value=}.",
            "the shape of one example, a numeric dtype, and one default, or one for each value.",
            "pass (3,) for three numbers per example, and omit dtype for float32.",
        )
    return NumericColumn(key, sizes, default, np.dtype(dtype).name, normalizer_fn)


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
    check_type("source_column", source_column, NumericColumn, error=ValueError)
    limits = tuple(map(float, boundaries))
    is_increasing = limits and all(low < high for low, high in itertools.pairwise(limits))
    if len(source_column.shape) > 1 or not is_increasing:
        raise ValueError(
            f"bucketized_column received {source_column!r} and boundaries={list(boundaries)!r}, "
            "not a column of at most one axis and increasing numbers."
        )
    return BucketizedColumn(source_column, limits)


# Columns of ids.


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityCategoricalColumn:
    """Returns a column for a feature that consists of ids.

    Args:
        key: the name of the feature.
        num_buckets: the number of ids, which start at 0; -1 means no value.
        default_value: replaces other ids; None makes them an error.

    Returns:
        A categorical column.

    Raises:
        ValueError: if `num_buckets` is below 1, or `default_value` is out of range.

    Example:
        >>> sg.feature_column.categorical_column_with_identity("city", num_buckets=3).num_buckets
        3

    Source: TF 2.21 feature_column_v2.py, categorical_column_with_identity.
    """
    owner = f"categorical_column_with_identity({key!r})"
    check_number(owner, num_buckets=num_buckets)
    if default_value is not None and not 0 <= default_value < num_buckets:
        raise ValueError(f"{owner} received default_value={default_value}, not an id of its own.")
    return IdentityCategoricalColumn(key, num_buckets, default_value)


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str | bytes | int],
    dtype: object = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyCategoricalColumn:
    """Returns a column whose ids are positions in a vocabulary list.

    Args:
        key: the name of the feature.
        vocabulary_list: the words: strings or integers.
        dtype: "string" or an integer type; None for the type of the list.
        default_value: the id of other words; -1 for no value.
        num_oov_buckets: the number of extra ids that other words are hashed to; excludes
            `default_value`.

    Returns:
        A categorical column.

    Raises:
        ValueError: if the list is empty, has duplicates or mixed types, or both `default_value` and
            `num_oov_buckets` are set.

    Example:
        >>> color = sg.feature_column.categorical_column_with_vocabulary_list(
        ...     "color", ["red", "green"], num_oov_buckets=2)
        >>> color.num_buckets
        4

    Source: TF 2.21 feature_column_v2.py, categorical_column_with_vocabulary_list.
    """
    words = [word.decode() if isinstance(word, bytes) else word for word in vocabulary_list]
    words = [word.item() if isinstance(word, np.generic) else word for word in words]
    owner = f"categorical_column_with_vocabulary_list({key!r})"
    if not words or len(set(words)) != len(words):
        raise ValueError(
            f"{owner} received {len(words)} words, {len(set(words))} of them distinct."
        )
    kinds = {type(word) for word in words}
    wanted = {str} if dtype in ("string", str) else {int} if dtype is not None else kinds
    if len(kinds) > 1 or not kinds <= {str, int} or kinds != wanted:
        names = sorted(kind.__name__ for kind in kinds)
        raise ValueError(
            f"{owner} received words of types {names}, not only strings or integers of {dtype=}."
        )
    return _vocabulary_column(key, tuple(words), default_value, num_oov_buckets)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: object = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
) -> VocabularyCategoricalColumn:
    r"""Returns a column whose ids are line numbers of a vocabulary file, from 0.

    The file is read immediately; the column stores its words.

    Args:
        key: the name of the feature.
        vocabulary_file: the path of the file, with one word per line.
        vocabulary_size: the number of lines to use; None for all.
        dtype: "string" or an integer type.
        default_value: the id of other words; None for no value.
        num_oov_buckets: the number of extra ids that other words are hashed to; excludes
            `default_value`.

    Returns:
        A categorical column.

    Raises:
        ValueError: if the file is empty or has fewer lines than `vocabulary_size`, or both
            `default_value` and `num_oov_buckets` are set.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder) / "cities.txt"
        ...     size = file.write_text("Rome\nParis\n")
        ...     city = sg.feature_column.categorical_column_with_vocabulary_file("city", file)
        >>> features = {"city": ["Paris", "Rome", "Oslo"]}
        >>> encoded = sg.feature_column.encode_features(features, [
        ...     sg.feature_column.indicator_column(city)])
        >>> [ids.ravel().tolist() for ids in encoded.values()]
        [[1, 0, -1]]

    Source: TF 2.21 feature_column_v2.py, categorical_column_with_vocabulary_file.
    """
    lines = Path(vocabulary_file).read_text(encoding="utf-8").splitlines()
    size = len(lines) if vocabulary_size is None else vocabulary_size
    if not 0 < size <= len(lines):
        raise ValueError(
            f"vocabulary_size={vocabulary_size} does not fit the {len(lines)} lines of "
            f"{vocabulary_file}."
        )
    words = tuple(map(str if dtype in ("string", str) else int, lines[:size]))
    default = -1 if default_value is None else default_value
    return _vocabulary_column(key, words, default, num_oov_buckets)


def _vocabulary_column(
    key: str, words: tuple[Any, ...], default_value: int, num_oov_buckets: int
) -> VocabularyCategoricalColumn:
    is_id = default_value == -1 or (0 <= default_value < len(words) and not num_oov_buckets)
    if num_oov_buckets < 0 or not is_id:
        raise ValueError(
            f"The vocabulary of {key!r} received num_oov_buckets={num_oov_buckets} and "
            f"default_value={default_value}: pass one of them, -1 or an id below {len(words)}."
        )
    return VocabularyCategoricalColumn(key, words, default_value, num_oov_buckets)


def categorical_column_with_hash_bucket(
    key: str, hash_bucket_size: int, dtype: object = "string"
) -> HashedCategoricalColumn:
    """Returns a column that hashes the values of a feature to ids.

    The hash is TensorFlow's (FarmHash's `Fingerprint64`): ids are the same on every machine, in
    every run, and as in a model trained with TensorFlow.

    Args:
        key: the name of the feature.
        hash_bucket_size: the number of ids, at least 2.
        dtype: "string" or an integer type; ignored, since both are accepted.

    Returns:
        A categorical column.

    Raises:
        ValueError: if `hash_bucket_size` is below 2.

    Example:
        >>> city = sg.feature_column.categorical_column_with_hash_bucket("city", 100)
        >>> city.ids({"city": ["Paris", "Rome", ""]}).tolist()
        [[50], [49], [-1]]

    Source: TF 2.21 feature_column_v2.py, categorical_column_with_hash_bucket.
    """
    del dtype
    check_number("categorical_column_with_hash_bucket", 2, hash_bucket_size=hash_bucket_size)
    return HashedCategoricalColumn(key, hash_bucket_size)


def crossed_column(
    keys: Sequence[str | CategoricalColumn], hash_bucket_size: int, hash_key: int | None = None
) -> CrossedColumn:
    """Returns a column that hashes each combination of several features' values to an id.

    Args:
        keys: two or more names of string or integer features, or categorical columns. Hashed
            columns (cross the feature itself) and weighted columns are not allowed. In a feature
            crossed by name, '' and -1 are ordinary values.
        hash_bucket_size: the number of ids.
        hash_key: the hash seed; None for TensorFlow's.

    Returns:
        A categorical column.

    Raises:
        ValueError: if there are fewer than two keys, a column is hashed or weighted, or
            `hash_bucket_size` is below 1.

    Example:
        >>> sg.feature_column.crossed_column(["city", "day"], 1000).name
        'city_X_day'

    Source: TF 2.21 feature_column_v2.py, crossed_column.
    """
    allowed = (str, CategoricalColumn)
    hashed = (HashedCategoricalColumn, WeightedCategoricalColumn)
    wrong = [key for key in keys if not isinstance(key, allowed) or isinstance(key, hashed)]
    if wrong or len(keys) < 2:
        raise ValueError(
            f"crossed_column received keys={list(keys)!r}, not two or more feature names, or "
            "categorical columns that are not hashed or weighted."
        )
    check_number("crossed_column", hash_bucket_size=hash_bucket_size)
    start = _DEFAULT_HASH_KEY if hash_key is None else hash_key
    return CrossedColumn(tuple(keys), hash_bucket_size, start)


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
        ValueError: if the column is not categorical.

    Example:
        >>> word = sg.feature_column.categorical_column_with_identity("word", 10)
        >>> sg.feature_column.weighted_categorical_column(word, "frequency").name
        'word_weighted_by_frequency'

    Source: TF 2.21 feature_column_v2.py, weighted_categorical_column.
    """
    _check_categorical("weighted_categorical_column", [categorical_column])
    return WeightedCategoricalColumn(categorical_column, weight_feature_key, np.dtype(dtype).name)


# Dense columns of ids.


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Returns a column that counts how often an example has each id.

    Args:
        categorical_column: the categorical column.

    Returns:
        A dense column of shape (batch, num_buckets).

    Raises:
        ValueError: if the column is not categorical.

    Example:
        >>> color = sg.feature_column.categorical_column_with_vocabulary_list("color", ["r", "g"])
        >>> layer = sg.feature_column.DenseFeatures([sg.feature_column.indicator_column(color)])
        >>> layer({"color": [["g"], ["r"], ["other"]]}).tolist()
        [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]

    Source: TF 2.21 feature_column_v2.py, indicator_column.
    """
    _check_categorical("indicator_column", [categorical_column])
    return IndicatorColumn(categorical_column)


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: Combiner = "mean",
    initializer: object = None,
    max_norm: float | None = None,
    trainable: bool = True,
) -> EmbeddingColumn:
    """Returns a column that looks up each id in a trained table.

    Args:
        categorical_column: the categorical column.
        dimension: the size of a row.
        combiner: how to combine the rows of several values: "mean", "sqrtn" or "sum".
        initializer: a Keras initializer of the table; None for a truncated normal distribution with
            standard deviation 1/sqrt(dimension).
        max_norm: scales longer rows down to this norm; None for no limit.
        trainable: True to train the table.

    Returns:
        A dense column of shape (batch, dimension).

    Raises:
        ValueError: if the column is not categorical, `dimension` is below 1, or the combiner is
            unknown.

    Example:
        >>> city = sg.feature_column.categorical_column_with_hash_bucket("city", 100)
        >>> sg.feature_column.embedding_column(city, dimension=8).name
        'city_embedding'

    Source: TF 2.21 feature_column_v2.py, embedding_column.
    """
    _check_categorical("embedding_column", [categorical_column])
    settings = _table_settings(dimension, combiner, initializer, max_norm, trainable)
    return EmbeddingColumn(categorical_column, *settings)


def shared_embeddings(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: Combiner = "mean",
    initializer: object = None,
    shared_embedding_collection_name: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
) -> list[EmbeddingColumn]:
    """Returns embedding columns that share one table within a layer.

    Args:
        categorical_columns: columns whose ids have the same meaning.
        dimension: the size of a row.
        combiner: as for `embedding_column`.
        initializer: as for `embedding_column`.
        shared_embedding_collection_name: the name of the table; None derives it from the columns.
        max_norm: as for `embedding_column`.
        trainable: as for `embedding_column`.

    Returns:
        A list of columns, in the order of `categorical_columns`.

    Raises:
        ValueError: as for `embedding_column`, or if the columns have different numbers of ids.

    Example:
        >>> seen = sg.feature_column.categorical_column_with_identity("seen", 10)
        >>> bought = sg.feature_column.categorical_column_with_identity("bought", 10)
        >>> [c.name for c in sg.feature_column.shared_embeddings([seen, bought], dimension=4)]
        ['seen_shared_embedding', 'bought_shared_embedding']

    Source: TF 2.21 feature_column_v2.py, shared_embedding_columns_v2.
    """
    _check_categorical("shared_embeddings", categorical_columns)
    settings = _table_settings(dimension, combiner, initializer, max_norm, trainable)
    sizes = [column.num_buckets for column in categorical_columns]
    if len(set(sizes)) != 1:
        raise ValueError(f"shared_embeddings received columns with {sizes} ids, not as many.")
    names = sorted(column.name for column in categorical_columns)
    name = shared_embedding_collection_name or "_".join([*names, "shared_embedding"])
    return [EmbeddingColumn(column, *settings, shared_name=name) for column in categorical_columns]


def _check_categorical(owner: str, columns: Sequence[Any]) -> None:
    wanted = "a categorical_column_with_*, crossed or bucketized column"
    for column in columns:
        check_type("A column", column, CategoricalColumn, wanted, owner=owner, error=ValueError)


def _table_settings(dimension: int, combiner: Combiner, *rest: Any) -> tuple[Any, ...]:
    check_number("An embedding", dimension=dimension)
    check_choice("An embedding", _COMBINERS, combiner=combiner)
    return dimension, combiner, *rest


# Keras layers of columns.


class _ColumnsLayer(keras.layers.Layer):
    """Keras layer of feature columns, called with a dict of features."""

    def __init__(self, feature_columns: Iterable[FeatureColumn], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._columns: tuple[Any, ...] = tuple(check_columns(feature_columns))
        self._tables: dict[str, keras.layers.Embedding] = {}

    def __call__(self, features: Mapping[str, Any], *args: object, **kwargs: object) -> Any:
        """Calls the layer, encoding the features first if necessary."""
        return super().__call__(_encoded(features, self._columns), *args, **kwargs)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments for Keras serialization."""
        columns = [keras.saving.serialize_keras_object(column) for column in self._columns]
        return {**super().get_config(), "feature_columns": columns}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Creates a layer from its config."""
        columns = map(keras.saving.deserialize_keras_object, config.pop("feature_columns"))
        return cls(list(columns), **config)

    def build(self, input_shape: object) -> None:
        """Creates the embedding tables."""
        del input_shape
        for column in self._columns:
            if isinstance(column, EmbeddingColumn) and column.table_name not in self._tables:
                self._add_table(column.table())

    def _add_table(self, table: keras.layers.Embedding) -> None:
        self._tables[table.name] = table
        table.build(None)

    def _dense(self, column: DenseColumn, features: Mapping[str, Any]) -> Any:
        if isinstance(column, EmbeddingColumn):
            return column.rows(features, self._tables[column.table_name])
        return column.numbers(features)


@keras.saving.register_keras_serializable("stratagem")
class DenseFeatures(_ColumnsLayer):
    """Keras layer that concatenates dense columns, sorted by name.

    In compiled steps, the features must come from `encode_features`; elsewhere they may be raw.

    Args:
        feature_columns: numeric, bucketized, indicator and embedding columns.
        kwargs: arguments of `keras.layers.Layer`.

    Raises:
        ValueError: if a column is categorical, two columns share a name, or a column cannot read
            the features.

    Example:
        >>> age = sg.feature_column.numeric_column("age")
        >>> columns = [age, sg.feature_column.bucketized_column(age, [18, 65])]
        >>> layer = sg.feature_column.DenseFeatures(columns)
        >>> layer({"age": [10, 70]}).tolist()
        [[10.0, 1.0, 0.0, 0.0], [70.0, 0.0, 0.0, 1.0]]

    Source: TF 2.21 dense_features_v2.py, DenseFeatures.
    """

    def __init__(self, feature_columns: Iterable[FeatureColumn], **kwargs: Any) -> None:
        super().__init__(feature_columns, **kwargs)
        for column in self._columns:
            if not isinstance(column, DenseColumn):
                raise ValueError(
                    f"DenseFeatures received the categorical column {column.name!r}: wrap it in "
                    "embedding_column or indicator_column."
                )

    def call(self, features: Mapping[str, Any]) -> Any:
        """Returns an array of shape (batch, sum of sizes)."""
        dense = [self._dense(column, features) for column in self._columns]
        return keras.ops.concatenate(dense, axis=-1)

    def compute_output_shape(self, input_shape: object) -> tuple[int | None, int]:
        """Returns the shape of the output."""
        return (None, sum(column.size for column in self._columns))


@keras.saving.register_keras_serializable("stratagem")
class LinearModel(_ColumnsLayer):
    """Keras layer that adds weights of ids, weighted numbers and a bias.

    Weights and bias start at zero. In compiled steps, the features must come from
    `encode_features`; elsewhere they may be raw.

    Args:
        feature_columns: any columns.
        units: the size of the output.
        sparse_combiner: how to combine the weights of several ids: "sum", "mean" or "sqrtn".
        kwargs: arguments of `keras.layers.Layer`.

    Raises:
        ValueError: if two columns share a name, the combiner is unknown, or a column cannot read
            the features.

    Example:
        >>> layer = sg.feature_column.LinearModel([sg.feature_column.numeric_column("age")])
        >>> layer({"age": [10, 70]}).tolist()
        [[0.0], [0.0]]

    Source: TF 2.21 canned/linear.py, LinearModel of feature_column_v2.py.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        units: int = 1,
        sparse_combiner: Combiner = "sum",
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_columns, **kwargs)
        check_number("LinearModel", units=units)
        check_choice("LinearModel", _COMBINERS, sparse_combiner=sparse_combiner)
        self.units = units
        self.sparse_combiner = sparse_combiner
        self._kernels: dict[str, Any] = {}

    def build(self, input_shape: object) -> None:
        """Creates the weights and the bias."""
        for column in self._columns:
            name = f"{column.name}_weights"
            if isinstance(column, CategoricalColumn):
                size, units = column.num_buckets, self.units
                self._add_table(keras.layers.Embedding(size, units, "zeros", name=name))
                continue
            if isinstance(column, EmbeddingColumn) and column.table_name not in self._tables:
                self._add_table(column.table())
            self._kernels[column.name] = self.add_weight(
                (column.size, self.units), "zeros", name=name
            )
        self.bias = self.add_weight((self.units,), "zeros", name="bias_weights")

    def call(self, features: Mapping[str, Any]) -> Any:
        """Returns an array of shape (batch, units)."""
        total: Any = self.bias
        for column in self._columns:
            if isinstance(column, CategoricalColumn):
                ids, weights = column.ids_and_weights(features)
                table = self._tables[f"{column.name}_weights"]
                total = total + combine_rows(table, ids, weights, self.sparse_combiner)
            else:
                kernel = self._kernels[column.name]
                total = total + keras.ops.matmul(self._dense(column, features), kernel)
        return total

    def compute_output_shape(self, input_shape: object) -> tuple[int | None, int]:
        """Returns the shape of the output."""
        return (None, self.units)

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor arguments for Keras serialization."""
        own = {"units": self.units, "sparse_combiner": self.sparse_combiner}
        return {**super().get_config(), **own}


def _encoded(features: Mapping[str, Any], columns: tuple[FeatureColumn, ...]) -> dict[str, Any]:
    """Returns the arrays that the columns read, encoding raw features."""
    names = sorted({name for column in columns for name in column.encoded_names})
    if not isinstance(features, Mapping):
        return encode_features(features, columns)
    missing = [name for name in names if name not in features]
    kinds = jax.Array | np.ndarray | keras.KerasTensor
    if not missing and all(isinstance(features[name], kinds) for name in names):
        return {name: features[name] for name in names}
    if any(isinstance(value, Tracer | keras.KerasTensor) for value in features.values()):
        raise invalid(
            f"A feature-column layer found no {missing} in the features {sorted(features)}.",
            expected="encoded features: compiled steps cannot process strings.",
            fix="return sg.feature_column.encode_features(features, columns) from the input "
            "function.",
            code="SG904",
        )
    return encode_features(features, columns)

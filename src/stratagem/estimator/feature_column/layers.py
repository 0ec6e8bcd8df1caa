"""DenseFeatures and LinearModel: Keras layers that read feature columns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import keras
import numpy as np
from jax.core import Tracer

from stratagem.errors import explain
from stratagem.estimator.checks import check_known, check_number
from stratagem.estimator.feature_column.columns import (
    CategoricalColumn,
    DenseColumn,
    FeatureColumn,
    check_columns,
    encode_features,
)

# Indicator and embedding columns: counts of ids, and trained rows per id.

Combiner = Literal["mean", "sqrtn", "sum"]
_COMBINERS = ("mean", "sqrtn", "sum")


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
    check_number("dimension", dimension, 1, or_none=False)
    check_known("combiner", [combiner], _COMBINERS)
    return EmbeddingColumn(
        categorical_column, dimension, combiner, initializer, max_norm, trainable
    )


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
    check_number("dimension", dimension, 1, or_none=False)
    check_known("combiner", [combiner], _COMBINERS)
    _check_same_ids(categorical_columns)
    names = sorted(column.name for column in categorical_columns)
    shared_name = shared_embedding_collection_name or "_".join([*names, "shared_embedding"])
    return [
        EmbeddingColumn(column, dimension, combiner, initializer, max_norm, trainable, shared_name)
        for column in categorical_columns
    ]


def _check_categorical(function_name: str, columns: Sequence[Any]) -> None:
    for column in columns:
        if not isinstance(column, CategoricalColumn):
            raise ValueError(
                explain(
                    f"{function_name} received {column!r}.",
                    expected="a categorical column.",
                    fix="pass a categorical_column_with_*, crossed or bucketized column.",
                )
            )


def _check_same_ids(columns: Sequence[CategoricalColumn]) -> None:
    sizes = [column.num_buckets for column in columns]
    if len(set(sizes)) != 1:
        raise ValueError(
            explain(
                f"shared_embeddings received columns with {sizes} ids.",
                expected="at least one column, all with the same number of ids.",
                fix="use the same vocabulary for all columns.",
            )
        )


class _ColumnsLayer(keras.layers.Layer):
    """Keras layer of feature columns, called with a dict of features."""

    def __init__(self, feature_columns: Iterable[FeatureColumn], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._columns = tuple(check_columns(feature_columns))
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
                    explain(
                        f"DenseFeatures received the categorical column {column.name!r}.",
                        expected="dense columns.",
                        fix="wrap it in embedding_column or indicator_column.",
                    )
                )

    def build(self, input_shape: object) -> None:
        """Creates the embedding tables."""
        for column in self._columns:
            if isinstance(column, EmbeddingColumn) and column.table_name not in self._tables:
                self._add_table(column.table())

    def call(self, features: Mapping[str, Any]) -> Any:
        """Returns an array of shape (batch, sum of sizes)."""
        dense = [
            self._dense(column, features)
            for column in self._columns
            if isinstance(column, DenseColumn)
        ]
        return keras.ops.concatenate(dense, axis=-1)

    def compute_output_shape(self, input_shape: object) -> tuple[int | None, int]:
        """Returns the shape of the output."""
        sizes = [column.size for column in self._columns if isinstance(column, DenseColumn)]
        return (None, sum(sizes))


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
        sparse_combiner: Literal["sum", "mean", "sqrtn"] = "sum",
        **kwargs: Any,
    ) -> None:
        super().__init__(feature_columns, **kwargs)
        check_number("units", units, 1, or_none=False)
        check_known("sparse_combiner", [sparse_combiner], _COMBINERS)
        self.units = units
        self.sparse_combiner = sparse_combiner
        self._kernels: dict[str, Any] = {}

    def build(self, input_shape: object) -> None:
        """Creates the weights and the bias."""
        for column in self._columns:
            if isinstance(column, CategoricalColumn):
                weights = keras.layers.Embedding(
                    column.num_buckets,
                    self.units,
                    embeddings_initializer="zeros",
                    name=f"{column.name}_weights",
                )
                self._add_table(weights)
            elif isinstance(column, DenseColumn):
                if isinstance(column, EmbeddingColumn) and column.table_name not in self._tables:
                    self._add_table(column.table())
                self._kernels[column.name] = self.add_weight(
                    shape=(column.size, self.units),
                    initializer="zeros",
                    name=f"{column.name}_weights",
                )
        self.bias = self.add_weight(shape=(self.units,), initializer="zeros", name="bias_weights")

    def call(self, features: Mapping[str, Any]) -> Any:
        """Returns an array of shape (batch, units)."""
        total: Any = self.bias
        for column in self._columns:
            if isinstance(column, CategoricalColumn):
                ids, weights = column.ids_and_weights(features)
                table = self._tables[f"{column.name}_weights"]
                total = total + combine_rows(table, ids, weights, self.sparse_combiner)
            elif isinstance(column, DenseColumn):
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
        raise ValueError(
            explain(
                f"A feature-column layer found no {missing} in the features {sorted(features)}.",
                expected="encoded features: compiled steps cannot process strings.",
                fix="return sg.feature_column.encode_features(features, columns) from the input "
                "function.",
                code="SG904",
            )
        )
    return encode_features(features, columns)

"""Dense columns of categorical ones: counts, and rows of tables that are trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from stratagem.estimator.feature_column.columns import CategoricalColumn, DenseColumn
from stratagem.messages import explain

__all__ = [
    "EmbeddingColumn",
    "IndicatorColumn",
    "combine_rows",
    "embedding_column",
    "indicator_column",
    "shared_embeddings",
]

Combiner = Literal["mean", "sqrtn", "sum"]


@dataclasses.dataclass(frozen=True)
class _OfCategories(DenseColumn):
    categorical_column: CategoricalColumn

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Those of the categorical column."""
        return self.categorical_column.encoded_names

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns what the categorical column reads."""
        return self.categorical_column.encode(features)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class IndicatorColumn(_OfCategories):
    """What `indicator_column` returns."""

    @property
    def name(self) -> str:
        """TensorFlow's name."""
        return f"{self.categorical_column.name}_indicator"

    @property
    def size(self) -> int:
        """One number an id."""
        return self.categorical_column.num_buckets

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Returns how often each id occurs, or its weights added up."""
        ids, weights = self.categorical_column.ids_and_weights(features)
        rows: Any = keras.ops.one_hot(ids, self.size, dtype="float32")
        if weights is not None:
            rows = rows * keras.ops.expand_dims(weights, -1)
        return keras.ops.sum(rows, axis=-2)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(_OfCategories):
    """What `embedding_column` and `shared_embeddings` return."""

    dimension: int
    combiner: Combiner
    initializer: Any
    max_norm: float | None
    trainable: bool
    shared_name: str | None = None

    @property
    def name(self) -> str:
        """TensorFlow's name."""
        suffix = "embedding" if self.shared_name is None else "shared_embedding"
        return f"{self.categorical_column.name}_{suffix}"

    @property
    def table_name(self) -> str:
        """The name of its table, which all columns that share it have."""
        return self.shared_name or self.name

    @property
    def size(self) -> int:
        """Numbers of a row of the table."""
        return self.dimension

    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Cannot be: the rows are those of a table, which a layer has."""
        raise ValueError(
            explain(
                f"{self.name!r} was read without its table.",
                expected="a layer that holds the table.",
                fix="pass the column to sg.feature_column.DenseFeatures.",
            )
        )

    def table(self) -> keras.layers.Embedding:
        """Makes a layer that looks up rows of a new table."""
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
        """Does the device part.

        Args:
            features: the encoded features.
            table: a layer that `table` made.

        Returns:
            float32 array of shape (batch, dimension); zeros for an example without values.
        """
        ids, weights = self.categorical_column.ids_and_weights(features)
        return combine_rows(table, ids, weights, self.combiner, self.max_norm)


def combine_rows(
    table: Any, ids: Any, weights: Any, combiner: str, max_norm: float | None = None
) -> Any:
    """Looks up the rows of an example's ids and makes one of them.

    Args:
        table: a `keras.layers.Embedding`.
        ids: int array of shape (batch, values), -1 for no value.
        weights: of the same shape, or None for ones. Those that are not above 0 count in sums only.
        combiner: "sum" of rows times weights; "mean", that over the sum of weights; "sqrtn", that
            over the root of the sum of their squares.
        max_norm: rows longer than this are made as long as this first.

    Returns:
        Array of shape (batch, dimension).

    Source: TF 2.21 embedding_ops.py, safe_embedding_lookup_sparse.
    """
    ops: Any = keras.ops
    ids = ops.convert_to_tensor(ids)
    rows = ops.cast(table(ops.maximum(ids, 0)), "float32")
    if max_norm is not None:
        squares = ops.sum(rows * rows, axis=-1, keepdims=True)
        # The root has no gradient at 0, where nothing is to be made shorter.
        norms = ops.sqrt(ops.where(squares > 0.0, squares, 1.0))
        rows = rows * (max_norm / ops.maximum(norms, max_norm))
    present = ops.cast(ids >= 0, "float32")
    weights = present if weights is None else present * ops.cast(weights, "float32")
    if combiner != "sum":
        weights = ops.relu(weights)
    total = ops.sum(rows * ops.expand_dims(weights, -1), axis=-2)
    if combiner == "sum":
        return total
    divisor = ops.sum(weights if combiner == "mean" else weights * weights, axis=-1, keepdims=True)
    divisor = ops.where(divisor > 0.0, divisor, 1.0)
    return total / (divisor if combiner == "mean" else ops.sqrt(divisor))


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Makes of each id a number: how often an example has it.

    Args:
        categorical_column: the feature.

    Returns:
        The column.

    Raises:
        ValueError: no categorical column.

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
    initializer: Any = None,
    max_norm: float | None = None,
    trainable: bool = True,
) -> EmbeddingColumn:
    """Makes of each id a row of a table that is trained.

    Args:
        categorical_column: the feature.
        dimension: numbers of a row.
        combiner: what is made of the rows of several values: "mean", "sqrtn" or "sum".
        initializer: of the table, as Keras takes it; None for a truncated normal distribution of
            deviation 1/sqrt(dimension).
        max_norm: rows longer than this are made as long as this; None for no limit.
        trainable: whether the table is trained.

    Returns:
        The column.

    Raises:
        ValueError: no categorical column, no positive dimension, or another combiner.

    Example:
        >>> city = sg.feature_column.categorical_column_with_hash_bucket("city", 100)
        >>> sg.feature_column.embedding_column(city, dimension=8).name
        'city_embedding'

    Source: TF 2.21 feature_column_v2.py, embedding_column.
    """
    _check_categorical("embedding_column", [categorical_column])
    _check_rows("embedding_column", dimension, combiner)
    return EmbeddingColumn(
        categorical_column, dimension, combiner, initializer, max_norm, trainable
    )


def shared_embeddings(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: Combiner = "mean",
    initializer: Any = None,
    shared_embedding_collection_name: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
) -> list[EmbeddingColumn]:
    """Makes embedding columns that share one table within a layer.

    Args:
        categorical_columns: features whose ids mean the same.
        dimension: numbers of a row.
        combiner: as for `embedding_column`.
        initializer: as for `embedding_column`.
        shared_embedding_collection_name: name of the table; None for one made of the columns'.
        max_norm: as for `embedding_column`.
        trainable: as for `embedding_column`.

    Returns:
        A list of columns, in the order given.

    Raises:
        ValueError: as for `embedding_column`, or columns of unequal numbers of ids.

    Example:
        >>> seen = sg.feature_column.categorical_column_with_identity("seen", 10)
        >>> bought = sg.feature_column.categorical_column_with_identity("bought", 10)
        >>> [c.name for c in sg.feature_column.shared_embeddings([seen, bought], dimension=4)]
        ['seen_shared_embedding', 'bought_shared_embedding']

    Source: TF 2.21 feature_column_v2.py, shared_embedding_columns_v2.
    """
    _check_categorical("shared_embeddings", categorical_columns)
    _check_rows("shared_embeddings", dimension, combiner)
    sizes = [column.num_buckets for column in categorical_columns]
    if len(set(sizes)) != 1:
        raise ValueError(
            explain(
                f"shared_embeddings received columns with {sizes} ids.",
                expected="at least one column, all with equally many ids.",
                fix="give them the same vocabulary.",
            )
        )
    names = sorted(column.name for column in categorical_columns)
    shared_name = shared_embedding_collection_name or "_".join([*names, "shared_embedding"])
    return [
        EmbeddingColumn(column, dimension, combiner, initializer, max_norm, trainable, shared_name)
        for column in categorical_columns
    ]


def _check_categorical(what: str, columns: Sequence[Any]) -> None:
    for column in columns:
        if not isinstance(column, CategoricalColumn):
            raise ValueError(
                explain(
                    f"{what} received {column!r}.",
                    expected="a categorical column.",
                    fix="pass a categorical_column_with_..., a crossed or a bucketized column.",
                )
            )


def _check_rows(what: str, dimension: int, combiner: str) -> None:
    if dimension < 1 or combiner not in ("mean", "sqrtn", "sum"):
        raise ValueError(
            explain(
                f"{what} received dimension={dimension} and combiner={combiner!r}.",
                expected="a positive dimension, and 'mean', 'sqrtn' or 'sum'.",
                fix="leave combiner out for the mean.",
            )
        )

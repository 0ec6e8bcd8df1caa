"""DenseFeatures and LinearModel: Keras layers that read feature columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import keras
import numpy as np
from jax.core import Tracer

from stratagem.estimator.feature_column.columns import (
    CategoricalColumn,
    DenseColumn,
    FeatureColumn,
    check_columns,
    encode_features,
)
from stratagem.estimator.feature_column.embeddings import EmbeddingColumn, combine_rows
from stratagem.messages import explain


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
        if sparse_combiner not in ("sum", "mean", "sqrtn") or units < 1:
            raise ValueError(
                explain(
                    f"LinearModel received units={units} and sparse_combiner={sparse_combiner!r}.",
                    expected="positive units, and 'sum', 'mean' or 'sqrtn'.",
                    fix="omit sparse_combiner for the sum.",
                )
            )
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

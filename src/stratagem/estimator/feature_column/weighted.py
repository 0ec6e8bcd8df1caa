"""Weighted categorical columns: values with weights from another feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.feature_column.columns import CategoricalColumn, feature_of, numeric_rows

if TYPE_CHECKING:
    from jax.typing import DTypeLike


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

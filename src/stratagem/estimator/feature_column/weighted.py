"""Categorical columns whose values have weights, given by another feature."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from stratagem.estimator.feature_column.columns import CategoricalColumn
from stratagem.estimator.feature_column.raw_values import feature_of, numeric_rows
from stratagem.messages import explain

__all__ = ["WeightedCategoricalColumn", "weighted_categorical_column"]


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class WeightedCategoricalColumn(CategoricalColumn):
    """What `weighted_categorical_column` returns."""

    categorical_column: CategoricalColumn
    weight_feature_key: str
    dtype: str

    @property
    def name(self) -> str:
        """TensorFlow's name."""
        return f"{self.categorical_column.name}_weighted_by_{self.weight_feature_key}"

    @property
    def num_buckets(self) -> int:
        """Those of its column."""
        return self.categorical_column.num_buckets

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Those of the ids and of their weights."""
        return self.encoded_name, f"{self.encoded_name}_weights"

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns those of its column."""
        return self.categorical_column.ids(features)

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the ids and their weights."""
        ids = self.ids(features)
        value = feature_of(features, self.weight_feature_key)
        if isinstance(value, list | tuple):  # of lists, which may be ragged as those of the values
            value = [list(np.ravel(row)) + [0.0] * (ids.shape[1] - np.size(row)) for row in value]
        value = np.asarray(value)
        shape = (1,) if value.ndim == 1 else value.shape[1:]
        weights = numeric_rows(value, self.weight_feature_key, shape, None, self.dtype)
        if weights.shape != ids.shape:
            raise ValueError(
                explain(
                    f"Feature {self.weight_feature_key!r} has shape {weights.shape}.",
                    expected=f"one weight for each of the values of shape {ids.shape}.",
                    fix="give values and weights the same shape.",
                )
            )
        weights = weights.astype(np.float32)
        return dict(zip(self.encoded_names, (ids, weights), strict=True))

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Returns ids and weights."""
        ids, weights = (feature_of(features, name) for name in self.encoded_names)
        return ids, weights


def weighted_categorical_column(
    categorical_column: CategoricalColumn, weight_feature_key: str, dtype: Any = "float32"
) -> WeightedCategoricalColumn:
    """Gives the values of a categorical feature weights.

    Args:
        categorical_column: the feature, of one or several values an example.
        weight_feature_key: name of the feature with one weight for each value.
        dtype: of the weights.

    Returns:
        The column.

    Raises:
        ValueError: no categorical column, or a dtype of no numbers.

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
                expected="a categorical column, and a dtype of numbers.",
                fix="pass a categorical_column_with_..., and leave dtype out.",
            )
        )
    return WeightedCategoricalColumn(categorical_column, weight_feature_key, np.dtype(dtype).name)

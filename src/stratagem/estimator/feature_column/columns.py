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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import keras
import numpy as np

from stratagem.estimator.feature_column.raw_values import feature_of
from stratagem.messages import explain


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

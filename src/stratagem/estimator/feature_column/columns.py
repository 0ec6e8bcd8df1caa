"""What every feature column is: a part on the host and a part on the device.

Strings cannot reach a device. So the host part of a column (`encode`) turns what the input function
gave into arrays of numbers, and its device part reads those in a Keras layer. Categorical columns
are the ones whose device part is ids: int32 arrays of shape (batch, values) where -1 is no value.
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

__all__ = [
    "CategoricalColumn",
    "DenseColumn",
    "FeatureColumn",
    "check_columns",
    "encode_features",
    "encode_groups",
]


@dataclasses.dataclass(frozen=True)
class FeatureColumn(abc.ABC):
    """How one or more features become inputs of a model."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Its name, which TensorFlow gives such a column."""

    @abc.abstractmethod
    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Does the host part.

        Args:
            features: dict of a batch, as the input function gives it.

        Returns:
            Dict of the arrays that the device part reads.
        """

    @property
    @abc.abstractmethod
    def encoded_names(self) -> tuple[str, ...]:
        """The names of the arrays that `encode` returns."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make this column, for Keras's files."""
        return {
            field.name: keras.saving.serialize_keras_object(getattr(self, field.name))
            for field in dataclasses.fields(self)
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Makes a column of what `get_config` returned."""
        read = {key: keras.saving.deserialize_keras_object(value) for key, value in config.items()}
        # JSON knows no tuples, and a list cannot be compared by hash.
        return cls(**{key: tuple(v) if isinstance(v, list) else v for key, v in read.items()})


class DenseColumn(FeatureColumn):
    """A column whose device part is numbers, one row an example."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """Numbers that one example has."""

    @abc.abstractmethod
    def numbers(self, features: Mapping[str, Any]) -> Any:
        """Does the device part without weights of its own.

        Args:
            features: the encoded features.

        Returns:
            float32 array of shape (batch, size).
        """


class CategoricalColumn(FeatureColumn):
    """A column whose device part is ids."""

    @property
    @abc.abstractmethod
    def num_buckets(self) -> int:
        """Ids are below this number."""

    @abc.abstractmethod
    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the ids of a batch on the host, shape (batch, values), int32, -1 for none."""

    @property
    def encoded_name(self) -> str:
        """The name under which the ids travel: another one for every other way to make them."""
        content = f"{type(self).__name__} {self!r}".encode()
        return f"{self.name}/ids_{hashlib.blake2s(content, digest_size=4).hexdigest()}"

    @property
    def encoded_names(self) -> tuple[str, ...]:
        """Its ids' name."""
        return (self.encoded_name,)

    def encode(self, features: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Returns the ids under their name."""
        return {self.encoded_name: self.ids(features)}

    def ids_and_weights(self, features: Mapping[str, Any]) -> tuple[Any, Any]:
        """Does the device part: the ids, and the weights of a weighted column (else None)."""
        return feature_of(features, self.encoded_name), None


def encode_features(
    features: Mapping[str, Any], feature_columns: Iterable[FeatureColumn]
) -> dict[str, np.ndarray]:
    """Does on the host what feature columns do there: vocabularies, hashes, crosses, padding.

    Pre-made estimators do it by themselves. A `model_fn` or a Keras model with `DenseFeatures` or
    `LinearModel` in it gets its batches through this function, in the input function.

    Args:
        features: dict of a batch: arrays, or lists, of strings or numbers. Several values an
            example are rows padded with '' or -1, or lists of any lengths, which are padded to the
            next power of two above the longest.
        feature_columns: all columns of the model.

    Returns:
        Dict of NumPy arrays: what the columns read. Features that no column names are left out.

    Raises:
        ValueError: a feature is missing or of the wrong kind; two columns share a name or read a
            feature differently.

    Example:
        >>> color = sg.feature_column.categorical_column_with_vocabulary_list("color", ["r", "g"])
        >>> columns = [sg.feature_column.indicator_column(color)]
        >>> list(sg.feature_column.encode_features({"color": ["g", "r"]}, columns).values())
        [array([[1],
               [0]], dtype=int32)]
    """
    return encode_groups(features, [feature_columns])


def encode_groups(
    features: Mapping[str, Any], groups: Iterable[Iterable[FeatureColumn]]
) -> dict[str, np.ndarray]:
    """Does what `encode_features` does for the columns of several layers.

    Args:
        features: dict of a batch.
        groups: columns, of which only those of one group must have different names.
    """
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
                expected="one column for one way to read a feature.",
                fix="make the source column once and use it in both.",
            )
        )


def check_columns(
    feature_columns: Iterable[FeatureColumn] | FeatureColumn,
) -> list[FeatureColumn]:
    """Returns columns in the order of their names.

    Raises:
        ValueError: none, something that is no column, or two that share a name.
    """
    columns: Sequence[Any] = (
        [feature_columns] if isinstance(feature_columns, FeatureColumn) else list(feature_columns)
    )
    wrong = [column for column in columns if not isinstance(column, FeatureColumn)]
    if wrong or not columns:
        raise ValueError(
            explain(
                f"feature_columns holds {wrong[0]!r}." if wrong else "feature_columns is empty.",
                expected="columns made by sg.feature_column.",
                fix="make it with sg.feature_column.numeric_column or another function there.",
            )
        )
    ordered = sorted(columns, key=lambda column: column.name)
    for first, second in itertools.pairwise(ordered):
        if first.name == second.name:
            raise ValueError(
                explain(
                    f"Two feature columns have the name {first.name!r}: {first} and {second}.",
                    expected="every column once.",
                    fix="leave one of them out.",
                )
            )
    return ordered

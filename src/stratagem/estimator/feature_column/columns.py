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

from stratagem.errors import explain

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

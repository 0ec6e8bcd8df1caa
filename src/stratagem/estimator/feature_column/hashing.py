"""Hashed and crossed categorical columns."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.feature_column.columns import (
    CategoricalColumn,
    KeyedCategoricalColumn,
    as_bytes,
    categorical_rows,
    feature_of,
)
from stratagem.estimator.feature_column.weighted import WeightedCategoricalColumn
from stratagem.parameter_server.fingerprints import concatenated_fingerprint, fingerprint

_DEFAULT_HASH_KEY = 0xDECAFCAFFE


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class HashedCategoricalColumn(KeyedCategoricalColumn):
    """Column created by `categorical_column_with_hash_bucket`."""

    hash_bucket_size: int

    @property
    def num_buckets(self) -> int:
        """Upper bound of ids, exclusive."""
        return self.hash_bucket_size

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns fingerprints of strings, or of integers in digits, modulo the buckets."""
        rows = categorical_rows(feature_of(features, self.key), self.key)
        ids = [
            -1
            if value is None or value in ("", b"", -1)
            else fingerprint(as_bytes(value)) % self.hash_bucket_size
            for value in rows.ravel().tolist()
        ]
        return np.asarray(ids, np.int32).reshape(rows.shape)


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
        if len({len(column) for column in columns}) != 1:
            raise ValueError(
                explain(
                    f"The features of {self.name!r} have {[len(column) for column in columns]} "
                    "examples.",
                    expected="the same number of examples in each.",
                    fix="return one row per example for every feature from the input function.",
                )
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
        return (
            functools.reduce(concatenated_fingerprint, present, self.hash_key)
            % self.hash_bucket_size
        )


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
    _check_buckets(f"categorical_column_with_hash_bucket({key!r})", hash_bucket_size, least=2)
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
    if len(keys) < 2:
        raise ValueError(
            explain(
                f"crossed_column received keys={list(keys)!r}.",
                expected="at least two.",
                fix="use categorical_column_with_hash_bucket for one feature.",
            )
        )
    allowed = (str, CategoricalColumn)
    hashed = (HashedCategoricalColumn, WeightedCategoricalColumn)
    wrong = [key for key in keys if not isinstance(key, allowed) or isinstance(key, hashed)]
    if wrong:
        raise ValueError(
            explain(
                f"crossed_column received {wrong[0]!r}.",
                expected="feature names, or categorical columns that are not hashed or weighted.",
                fix="pass the name of the feature itself.",
            )
        )
    _check_buckets("crossed_column", hash_bucket_size, least=1)
    start = _DEFAULT_HASH_KEY if hash_key is None else hash_key
    return CrossedColumn(tuple(keys), hash_bucket_size, start)


def _check_buckets(function_name: str, hash_bucket_size: int, *, least: int) -> None:
    if not isinstance(hash_bucket_size, int) or hash_bucket_size < least:
        raise ValueError(
            explain(
                f"{function_name} received hash_bucket_size={hash_bucket_size!r}.",
                expected=f"an integer of at least {least}.",
                fix="pass several times the number of distinct values.",
            )
        )

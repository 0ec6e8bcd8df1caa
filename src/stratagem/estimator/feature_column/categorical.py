"""Categorical columns: ids, vocabularies, hashes and crosses."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.checks import check_number
from stratagem.estimator.feature_column.columns import (
    CategoricalColumn,
    KeyedCategoricalColumn,
    WeightedCategoricalColumn,
    as_bytes,
    categorical_rows,
    feature_of,
)
from stratagem.parameter_server.fingerprints import concatenated_fingerprint, fingerprint


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class IdentityCategoricalColumn(KeyedCategoricalColumn):
    """Column created by `categorical_column_with_identity`."""

    number_buckets: int
    default_value: int | None

    @property
    def num_buckets(self) -> int:
        """Upper bound of ids, exclusive."""
        return self.number_buckets

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the feature, with the default for ids out of range."""
        rows = categorical_rows(feature_of(features, self.key), self.key)
        if rows.dtype == object:
            if any(isinstance(value, str | bytes) for value in rows.flat):
                raise ValueError(
                    explain(
                        f"Feature {self.key!r} of an identity column contains strings.",
                        expected="integers.",
                        fix="use categorical_column_with_vocabulary_list.",
                    )
                )
            ids = [-1 if value is None else value for value in rows.flat]
            rows = np.asarray(ids, np.int64).reshape(rows.shape)
        outside = (rows != -1) & ((rows < 0) | (rows >= self.num_buckets))
        if outside.any() and self.default_value is None:
            raise ValueError(
                explain(
                    f"Feature {self.key!r} contains {int(rows[outside][0])}.",
                    expected=f"0 <= id < num_buckets={self.num_buckets}, or -1 for no value.",
                    fix="pass default_value to replace ids that are out of range.",
                )
            )
        default = -1 if self.default_value is None else self.default_value
        return np.where(outside, default, rows).astype(np.int32)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class VocabularyCategoricalColumn(KeyedCategoricalColumn):
    """Column with a vocabulary of strings or integers."""

    vocabulary: tuple[str | int, ...]
    default_value: int
    num_oov_buckets: int

    @property
    def num_buckets(self) -> int:
        """Number of words and out-of-vocabulary buckets."""
        return len(self.vocabulary) + self.num_oov_buckets

    @functools.cached_property
    def _ids_by_word(self) -> dict[Any, int]:
        return {_as_word(word): index for index, word in enumerate(self.vocabulary)}

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the positions of words in the vocabulary."""
        rows = categorical_rows(feature_of(features, self.key), self.key)
        words = [_as_word(value) for value in rows.ravel().tolist()]
        kind = type(_as_word(self.vocabulary[0]))
        if any(word is not None and type(word) is not kind for word in words):
            raise ValueError(
                explain(
                    f"Feature {self.key!r} and its vocabulary have different types.",
                    expected=f"{kind.__name__}, like {self.vocabulary[0]!r}.",
                    fix="convert the vocabulary to the type of the feature.",
                )
            )
        ids = [self._id_of(word) for word in words]
        return np.asarray(ids, np.int32).reshape(rows.shape)

    def _id_of(self, word: object) -> int:
        if word is None or word in (b"", -1):
            return -1
        known_id = self._ids_by_word.get(word)
        if known_id is not None:
            return known_id
        if self.num_oov_buckets:
            return len(self.vocabulary) + fingerprint(as_bytes(word)) % self.num_oov_buckets
        return self.default_value


def _as_word(value: object) -> Any:
    return value.encode() if isinstance(value, str) else value


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
    check_number("num_buckets", num_buckets, 1, or_none=False)
    if default_value is not None and not 0 <= default_value < num_buckets:
        raise ValueError(
            explain(
                f"categorical_column_with_identity({key!r}) received "
                f"default_value={default_value}.",
                expected=f"0 <= default_value < num_buckets={num_buckets}.",
                fix="pass an id in this range.",
            )
        )
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
    _check_words(key, words, dtype)
    return _vocabulary_column(key, tuple(words), default_value, num_oov_buckets)


def _check_words(key: str, words: Sequence[Any], dtype: Any) -> None:
    if not words or len(set(words)) != len(words):
        raise ValueError(
            explain(
                f"categorical_column_with_vocabulary_list({key!r}) received {len(words)} words, "
                f"{len(set(words))} of them distinct.",
                expected="at least one word and no duplicates.",
                fix="remove duplicates.",
            )
        )
    kinds = {type(word) for word in words}
    wanted = {str} if dtype in ("string", str) else {int} if dtype is not None else kinds
    if len(kinds) > 1 or not kinds <= {str, int} or kinds != wanted:
        raise ValueError(
            explain(
                f"categorical_column_with_vocabulary_list({key!r}) received words of types "
                f"{sorted(kind.__name__ for kind in kinds)}, dtype={dtype!r}.",
                expected="only strings or only integers, matching dtype.",
                fix="convert the words to the type of the feature.",
            )
        )


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
    to_word = str if dtype in ("string", str) else int
    words = tuple(to_word(line) for line in _lines_of(vocabulary_file, vocabulary_size))
    default = -1 if default_value is None else default_value
    return _vocabulary_column(key, words, default, num_oov_buckets)


def _lines_of(vocabulary_file: str | os.PathLike[str], vocabulary_size: int | None) -> list[str]:
    lines = Path(vocabulary_file).read_text(encoding="utf-8").splitlines()
    size = len(lines) if vocabulary_size is None else vocabulary_size
    if not 0 < size <= len(lines):
        raise ValueError(
            explain(
                f"vocabulary_size={vocabulary_size} does not fit the {len(lines)} lines of "
                f"{vocabulary_file}.",
                expected="a size from 1 to the number of lines.",
                fix="omit vocabulary_size to use all lines.",
            )
        )
    return lines[:size]


def _vocabulary_column(
    key: str, words: tuple[Any, ...], default_value: int, num_oov_buckets: int
) -> VocabularyCategoricalColumn:
    is_id = default_value == -1 or (0 <= default_value < len(words) and not num_oov_buckets)
    if num_oov_buckets < 0 or not is_id:
        raise ValueError(
            explain(
                f"The vocabulary of {key!r} received num_oov_buckets={num_oov_buckets} and "
                f"default_value={default_value}.",
                expected=f"default_value=-1, or an id below {len(words)} without buckets.",
                fix="remove one of them, or pass the id of a word in the vocabulary.",
            )
        )
    return VocabularyCategoricalColumn(key, words, default_value, num_oov_buckets)


# Hashed and crossed categorical columns.


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
    _check_buckets("categorical_column_with_hash_bucket", hash_bucket_size, least=2)
    return HashedCategoricalColumn(key, hash_bucket_size)


def _check_buckets(owner: str, hash_bucket_size: object, *, least: int) -> None:
    """Raises what TensorFlow raises, ValueError for None too."""
    if not isinstance(hash_bucket_size, int) or hash_bucket_size < least:
        raise ValueError(
            explain(
                f"{owner} received hash_bucket_size={hash_bucket_size!r}.",
                expected=f"an integer of at least {least}.",
                fix="pass the number of buckets to hash to.",
            )
        )


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
            explain(
                f"crossed_column received keys={list(keys)!r}.",
                expected="two or more feature names, or categorical columns that are not hashed "
                "or weighted.",
                fix="pass the names of the features themselves.",
            )
        )
    _check_buckets("crossed_column", hash_bucket_size, least=1)
    start = _DEFAULT_HASH_KEY if hash_key is None else hash_key
    return CrossedColumn(tuple(keys), hash_bucket_size, start)

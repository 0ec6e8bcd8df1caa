"""Categorical columns whose ids are places: in a range, in a list, in a file."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from stratagem.estimator.feature_column.columns import CategoricalColumn
from stratagem.estimator.feature_column.fingerprints import fingerprint
from stratagem.estimator.feature_column.raw_values import as_bytes, categorical_rows, feature_of
from stratagem.messages import explain

__all__ = [
    "IdentityCategoricalColumn",
    "VocabularyCategoricalColumn",
    "categorical_column_with_identity",
    "categorical_column_with_vocabulary_file",
    "categorical_column_with_vocabulary_list",
]


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class IdentityCategoricalColumn(CategoricalColumn):
    """What `categorical_column_with_identity` returns."""

    key: str
    number_buckets: int
    default_value: int | None

    @property
    def name(self) -> str:
        """The feature's name."""
        return self.key

    @property
    def num_buckets(self) -> int:
        """Ids are below this number."""
        return self.number_buckets

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the feature, with the default for what is out of range."""
        rows = categorical_rows(feature_of(features, self.key), self.key)
        if rows.dtype == object:
            if any(isinstance(value, str | bytes) for value in rows.flat):
                raise ValueError(
                    explain(
                        f"Feature {self.key!r} of an identity column holds strings.",
                        expected="integers.",
                        fix="use categorical_column_with_vocabulary_list.",
                    )
                )
            places = [-1 if value is None else value for value in rows.flat]
            rows = np.asarray(places, np.int64).reshape(rows.shape)
        outside = (rows != -1) & ((rows < 0) | (rows >= self.num_buckets))
        if outside.any() and self.default_value is None:
            raise ValueError(
                explain(
                    f"Feature {self.key!r} holds {int(rows[outside][0])}.",
                    expected=f"0 <= id < num_buckets={self.num_buckets}, or -1 for no value.",
                    fix="pass default_value for the ids that are out of range.",
                )
            )
        default = -1 if self.default_value is None else self.default_value
        return np.where(outside, default, rows).astype(np.int32)


@keras.saving.register_keras_serializable("stratagem")
@dataclasses.dataclass(frozen=True)
class VocabularyCategoricalColumn(CategoricalColumn):
    """What the columns with a vocabulary are; strings are kept as bytes-like text."""

    key: str
    vocabulary: tuple[str | int, ...]
    default_value: int
    num_oov_buckets: int

    @property
    def name(self) -> str:
        """The feature's name."""
        return self.key

    @property
    def num_buckets(self) -> int:
        """Words and buckets for other words."""
        return len(self.vocabulary) + self.num_oov_buckets

    @functools.cached_property
    def _places(self) -> dict[Any, int]:
        return {_as_word(word): place for place, word in enumerate(self.vocabulary)}

    def ids(self, features: Mapping[str, Any]) -> np.ndarray:
        """Returns the places of words in the vocabulary."""
        rows = categorical_rows(feature_of(features, self.key), self.key)
        words = [_as_word(value) for value in rows.ravel().tolist()]
        kind = type(_as_word(self.vocabulary[0]))
        if any(word is not None and type(word) is not kind for word in words):
            raise ValueError(
                explain(
                    f"Feature {self.key!r} holds values of other types than its vocabulary.",
                    expected=f"{kind.__name__}, as {self.vocabulary[0]!r} is.",
                    fix="give the vocabulary in the type of the feature.",
                )
            )
        places = [self._place(word) for word in words]
        return np.asarray(places, np.int32).reshape(rows.shape)

    def _place(self, word: Any) -> int:
        if word is None or word in (b"", -1):
            return -1
        place = self._places.get(word)
        if place is not None:
            return place
        if self.num_oov_buckets:
            return len(self.vocabulary) + fingerprint(as_bytes(word)) % self.num_oov_buckets
        return self.default_value


def _as_word(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def categorical_column_with_identity(
    key: str, num_buckets: int, default_value: int | None = None
) -> IdentityCategoricalColumn:
    """Says that a feature is ids already.

    Args:
        key: the feature's name.
        num_buckets: ids are 0 to this number less one; -1 is no value.
        default_value: what other ids become; None if they are errors.

    Returns:
        The column.

    Raises:
        ValueError: `num_buckets` below one, or a default outside of it.

    Example:
        >>> sg.feature_column.categorical_column_with_identity("city", num_buckets=3).num_buckets
        3

    Source: TF 2.21 feature_column_v2.py, categorical_column_with_identity.
    """
    if num_buckets < 1:
        raise ValueError(
            explain(
                f"categorical_column_with_identity({key!r}) received num_buckets={num_buckets}.",
                expected="at least 1.",
                fix="pass the largest id plus one.",
            )
        )
    if default_value is not None and not 0 <= default_value < num_buckets:
        raise ValueError(
            explain(
                f"categorical_column_with_identity({key!r}) received "
                f"default_value={default_value}.",
                expected=f"0 <= default_value < num_buckets={num_buckets}.",
                fix="pass an id of the range.",
            )
        )
    return IdentityCategoricalColumn(key, num_buckets, default_value)


def categorical_column_with_vocabulary_list(
    key: str,
    vocabulary_list: Sequence[str | bytes | int],
    dtype: Any = None,
    default_value: int = -1,
    num_oov_buckets: int = 0,
) -> VocabularyCategoricalColumn:
    """Says that a feature is words of a list; ids are their places.

    Args:
        key: the feature's name.
        vocabulary_list: the words: strings, or integers.
        dtype: of the feature, "string" or an integer type; None for that of the list.
        default_value: id of other words; -1 for none.
        num_oov_buckets: instead, the number of further ids over which other words are spread by
            hash.

    Returns:
        The column.

    Raises:
        ValueError: an empty list, a word twice, words of other types, or both of default and
            buckets.

    Example:
        >>> color = sg.feature_column.categorical_column_with_vocabulary_list(
        ...     "color", ["red", "green"], num_oov_buckets=2)
        >>> color.num_buckets
        4

    Source: TF 2.21 feature_column_v2.py, categorical_column_with_vocabulary_list.
    """
    words = [word.decode() if isinstance(word, bytes) else word for word in vocabulary_list]
    words = [word.item() if isinstance(word, np.generic) else word for word in words]
    if not words or len(set(words)) != len(words):
        raise ValueError(
            explain(
                f"categorical_column_with_vocabulary_list({key!r}) received {len(words)} words, "
                f"{len(set(words))} of them different.",
                expected="at least one word, each once.",
                fix="leave out doubles.",
            )
        )
    kinds = {type(word) for word in words}
    wanted = {str} if dtype in ("string", str) else {int} if dtype is not None else kinds
    if len(kinds) > 1 or not kinds <= {str, int} or kinds != wanted:
        raise ValueError(
            explain(
                f"categorical_column_with_vocabulary_list({key!r}) received words of the types "
                f"{sorted(kind.__name__ for kind in kinds)}, dtype={dtype!r}.",
                expected="only strings or only integers, as dtype says.",
                fix="turn the words into the type of the feature.",
            )
        )
    return _vocabulary_column(key, tuple(words), default_value, num_oov_buckets)


def categorical_column_with_vocabulary_file(
    key: str,
    vocabulary_file: str | os.PathLike[str],
    vocabulary_size: int | None = None,
    dtype: Any = "string",
    default_value: int | None = None,
    num_oov_buckets: int = 0,
) -> VocabularyCategoricalColumn:
    """Says that a feature is words of a file, one a line; ids are line numbers from 0.

    The file is read here and now: the column carries its words.

    Args:
        key: the feature's name.
        vocabulary_file: its path.
        vocabulary_size: how many lines to take; None for all.
        dtype: of the feature, "string" or an integer type.
        default_value: id of other words; None for none.
        num_oov_buckets: instead, the number of further ids over which other words are spread by
            hash.

    Returns:
        The column.

    Raises:
        ValueError: fewer lines than `vocabulary_size`, an empty file, or both of default and
            buckets.

    Example::

        city = sg.feature_column.categorical_column_with_vocabulary_file("city", "cities.txt")

    Source: TF 2.21 feature_column_v2.py, categorical_column_with_vocabulary_file.
    """
    lines = Path(vocabulary_file).read_text(encoding="utf-8").splitlines()
    size = len(lines) if vocabulary_size is None else vocabulary_size
    if not 0 < size <= len(lines):
        raise ValueError(
            explain(
                f"{vocabulary_file} holds {len(lines)} words; vocabulary_size={vocabulary_size}.",
                expected="a size from 1 to the number of lines.",
                fix="leave vocabulary_size out to take all lines.",
            )
        )
    kept = lines[:size]
    words = tuple(kept) if dtype in ("string", str) else tuple(int(line) for line in kept)
    default = -1 if default_value is None else default_value
    return _vocabulary_column(key, words, default, num_oov_buckets)


def _vocabulary_column(
    key: str, words: tuple[Any, ...], default_value: int, num_oov_buckets: int
) -> VocabularyCategoricalColumn:
    if num_oov_buckets < 0 or (num_oov_buckets and default_value != -1):
        raise ValueError(
            explain(
                f"The vocabulary of {key!r} received num_oov_buckets={num_oov_buckets} and "
                f"default_value={default_value}.",
                expected="0 or more buckets, and a default only without them.",
                fix="leave one of them out.",
            )
        )
    if default_value != -1 and not 0 <= default_value < len(words):
        raise ValueError(
            explain(
                f"The vocabulary of {key!r} received default_value={default_value}.",
                expected=f"-1, or 0 <= default_value < {len(words)}.",
                fix="pass the id of a word.",
            )
        )
    return VocabularyCategoricalColumn(key, words, default_value, num_oov_buckets)

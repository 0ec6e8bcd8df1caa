"""Initial rows of keyed tables, computed from the key: the same on any server and in any order."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.special import ndtri

from stratagem.messages import explain
from stratagem.parameter_server.server.tables.key_hash import GOLDEN, mix64, seeded
from stratagem.parameter_server.server.tables.row_formats import RowFormat

_KINDS = ("constant", "uniform", "normal", "truncated_normal")
_MOST_NUMBERS = 2**16  # computed at once: temporary arrays stay in the processor's cache
# Probability that a standard normal number is below -2.
_BELOW_TWO = 0.5 * math.erfc(math.sqrt(2))


@dataclasses.dataclass(frozen=True)
class RowInitializer:
    """Distribution of initial rows, as data: no code of a client runs on a server.

    The bits of a row are a SplitMix64 stream whose start is a hash of the key and the seed. Each of
    its numbers gives two columns, the low half first.

    Args:
        kind: "constant", "uniform", "normal", or "truncated_normal" at two standard deviations.
        a: constant, least value or mean.
        b: largest value or standard deviation.
        seed: tables with different seeds have different rows.

    Raises:
        ValueError: another kind, or a negative standard deviation.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
    """

    kind: str = "constant"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        is_normal = self.kind in ("normal", "truncated_normal")
        if self.kind not in _KINDS or (is_normal and self.b < 0):
            raise ValueError(
                explain(
                    f"{self} is not an initializer of a keyed table.",
                    expected=f"one of {_KINDS}, and a deviation of at least 0.",
                    fix="use a uniform, normal or constant initializer of Keras.",
                )
            )

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> RowInitializer:
        """Returns the initializer from the fields of `dataclasses.asdict`."""
        return cls(**fields)

    def stored(self, keys: np.ndarray, format: RowFormat) -> np.ndarray:
        """Returns the initial row of each key in a format, which may round it."""
        rows = self.rows(keys, format.row_shape, np.dtype(format.dtype))
        return format.stored(rows, keys, np.zeros(len(keys), np.uint64))

    def rows(self, keys: np.ndarray, row_shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns the initial row of each key, of shape (k, *row_shape)."""
        width = math.prod(row_shape)
        if self.kind == "constant" or not width:
            return np.full((len(keys), *row_shape), self.a, dtype)
        rows = np.empty((len(keys), width), dtype)
        count = max(1, _MOST_NUMBERS // width)
        for first in range(0, len(keys), count):
            rows[first : first + count] = self._drawn(keys[first : first + count], width)
        return rows.reshape(len(keys), *row_shape)

    def _drawn(self, keys: np.ndarray, width: int) -> np.ndarray:
        steps = np.arange(1, width // 2 + width % 2 + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        words = mix64(seeded(keys, self.seed)[:, None] + steps)
        bits = words.astype("<u8", copy=False).view("<u4")[:, :width]
        if self.kind == "uniform":  # 24 bits: each is a float32
            numbers = (bits >> np.uint32(8)).astype(np.float32)
            numbers *= np.float32((self.b - self.a) / 2**24)
            numbers += np.float32(self.a)
            return numbers
        share = (bits + 0.5) / 2**32
        if self.kind == "truncated_normal":
            share = _BELOW_TWO + (1 - 2 * _BELOW_TWO) * share
        return self.a + self.b * ndtri(share)

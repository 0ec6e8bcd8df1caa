"""Formats in which servers hold rows: as computed with, or rounded to bfloat16 or int8.

Rounding is stochastic, so that a long series of small updates has its effect. The random bits are
hashes of the table's seed, the key, the number of updates of the row, and the column.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.errors import invalid

# Hash of 64-bit keys, and streams of bits that depend on a key and a seed.

_BUCKET_BITS = 12
# Enough that each of up to hundreds of servers has about the same number of keys, and few enough to
# move one at a time to another server.
BUCKET_COUNT = 1 << _BUCKET_BITS

# Increment of SplitMix64: the odd number next to 2**64 divided by the golden ratio.
GOLDEN = 0x9E3779B97F4A7C15

_FIRST, _SECOND = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
_MASK = 2**64 - 1


def mix64(numbers: np.ndarray) -> np.ndarray:
    """Returns 64 mixed bits for each uint64: a bijection in which each bit depends on all.

    Source: finalizer of MurmurHash3.
    """
    mixed = numbers ^ (numbers >> _SHIFT)
    mixed *= _FIRST
    mixed ^= mixed >> _SHIFT
    mixed *= _SECOND
    mixed ^= mixed >> _SHIFT
    return mixed


def buckets_of(keys: np.ndarray) -> np.ndarray:
    """Returns the bucket of each key: the upper bits of its hash."""
    return (mix64(keys.view(np.uint64)) >> np.uint64(64 - _BUCKET_BITS)).astype(np.intp)


def seeded(keys: np.ndarray, seed: int) -> np.ndarray:
    """Returns 64 mixed bits for each int64 key, which depend on a seed."""
    start = np.array([(seed + GOLDEN) & _MASK], np.uint64)
    return mix64(keys.view(np.uint64) ^ mix64(start))


def stream(starts: np.ndarray, width: int, bits: int) -> np.ndarray:
    """Returns random numbers of 16 or 32 bits for each start and column: a SplitMix64 stream."""
    in_word = 64 // bits
    steps = np.arange(1, -(-width // in_word) + 1, dtype=np.uint64) * np.uint64(GOLDEN)
    words = mix64(starts[:, None] + steps)
    return words.astype("<u8", copy=False).view(f"<u{bits // 8}")[:, :width]


ROW_DTYPES: tuple[str, ...] = ("bfloat16", "int8")
_STREAM = 0x73746F7265640001  # other bits than those of initial rows
_MOST_NUMBERS = 2**16  # computed at once: temporary arrays stay in the processor's cache
_EXPONENT, _QUIET = np.uint32(0x7F800000), np.uint16(0x0040)
_SCALE_BYTES = 4
_LARGEST = 127  # of int8: the range is symmetric
_ROUNDED_BITS = np.uint32(0x7F)  # of a scale, and as many as a multiple has
_LEAST_SCALE = np.finfo(np.float32).tiny


@dataclasses.dataclass(frozen=True)
class RowFormat:
    """Format of the rows of a table on servers, on disk, in files and in answers to pulls.

    In "bfloat16", a number is the upper half of a float32, as uint16. In "int8", a row has a
    float32 scale and then its numbers as multiples of it. The scale is the smallest one of 17 bits
    that has all of them between -127 and 127. A float32 has 24 bits, so each multiple is exact, and
    a row that an update leaves has the same scale again.

    Args:
        row_shape: shape of a row.
        dtype: dtype name in which updates compute and clients see rows.
        storage_dtype: one of `ROW_DTYPES`; None for `dtype`.
        seed: seed of the random bits.

    Raises:
        ValueError: `storage_dtype` is given, and `dtype` is not float32.

    Source: Gupta and others, Deep learning with limited numerical precision (2015).
    """

    row_shape: tuple[int, ...]
    dtype: str
    storage_dtype: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.storage_dtype is not None and self.dtype != "float32":
            raise invalid(
                f"Rows of dtype {self.dtype} have the storage_dtype {self.storage_dtype!r}.",
                expected="rows of dtype float32.",
                fix='create the layer with dtype="float32" or a mixed policy, or omit '
                "storage_dtype.",
            )

    @classmethod
    def of(cls, row_shape: tuple[int, ...], dtype: str, table: Mapping[str, Any]) -> RowFormat:
        """Returns the format of a table with these options as JSON."""
        seed = (table.get("initializer") or {}).get("seed", 0)
        return cls(tuple(row_shape), dtype, table.get("storage_dtype"), seed)

    @property
    def is_plain(self) -> bool:
        """True if rows are stored as they are computed with."""
        return self.storage_dtype is None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of a stored row."""
        is_int8 = self.storage_dtype == "int8"
        return (_SCALE_BYTES + math.prod(self.row_shape),) if is_int8 else self.row_shape

    @property
    def stored_dtype(self) -> np.dtype:
        """NumPy dtype of stored rows."""
        names = {None: self.dtype, "bfloat16": "uint16", "int8": "int8"}
        return np.dtype(names[self.storage_dtype])

    @property
    def stored_bytes(self) -> int:
        """Size of a stored row."""
        return math.prod(self.stored_shape) * self.stored_dtype.itemsize

    def stored(
        self,
        rows: np.ndarray,
        keys: np.ndarray | None = None,
        counts: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns rows of shape (k, *row_shape) in this format.

        They are rounded stochastically, by their keys and numbers of updates; without these, to
        the nearest. Then a row with an infinite or undefined number has only undefined ones in
        "int8".
        """
        if self.is_plain:
            return rows
        width = math.prod(self.row_shape)
        flat = np.ascontiguousarray(rows, np.float32).reshape(len(rows), width)
        stored = np.empty((len(rows), *self.stored_shape), self.stored_dtype)
        count = max(1, _MOST_NUMBERS // max(1, width))
        for first in range(0, len(rows), count):
            part = slice(first, first + count)
            starts = None
            if keys is not None and counts is not None:
                updates = mix64(counts[part].astype(np.uint64) * np.uint64(GOLDEN))
                starts = seeded(keys[part], self.seed ^ _STREAM) ^ updates
            if self.storage_dtype == "bfloat16":
                stored[part] = _bfloat16(flat[part], starts).reshape(-1, *self.row_shape)
            else:
                _put_int8(flat[part], starts, stored[part])
        return stored

    def expanded(self, stored: np.ndarray) -> np.ndarray:
        """Returns stored rows as they are computed with."""
        if self.is_plain:
            return stored
        if self.storage_dtype == "bfloat16":
            return (stored.astype(np.uint32) << np.uint32(16)).view(np.float32)
        scales = np.ascontiguousarray(stored[:, :_SCALE_BYTES]).view(np.float32)
        return (stored[:, _SCALE_BYTES:] * scales).reshape(len(stored), *self.row_shape)


def _bfloat16(rows: np.ndarray, starts: np.ndarray | None) -> np.ndarray:
    """Adds random bits below the last one that stays: exact for each float32."""
    bits = rows.view(np.uint32)
    added = np.uint32(0x8000) if starts is None else stream(starts, rows.shape[1], 16)
    rounded = ((bits + added) >> np.uint32(16)).astype(np.uint16)
    is_finite = (bits & _EXPONENT) != _EXPONENT
    if not is_finite.all():
        upper = (bits >> np.uint32(16)).astype(np.uint16)
        upper[np.isnan(rows)] |= _QUIET
        rounded[~is_finite] = upper[~is_finite]
    return rounded


def _put_int8(rows: np.ndarray, starts: np.ndarray | None, stored: np.ndarray) -> None:
    largest = np.abs(rows).max(axis=1, initial=0)
    is_finite = np.isfinite(largest)
    if not is_finite.all():
        rows = np.where(is_finite[:, None], rows, np.float32(0))
    wanted = np.where(is_finite, largest, 0).astype(np.float64) / _LARGEST
    scales = np.maximum(wanted.astype(np.float32), _LEAST_SCALE)
    scales = np.where(scales < wanted, np.nextafter(scales, np.float32(np.inf)), scales)
    scales = ((scales.view(np.uint32) + _ROUNDED_BITS) & ~_ROUNDED_BITS).view(np.float32)
    exact = rows / scales[:, None].astype(np.float64)
    low = np.floor(exact)
    shares = np.float32(0.5)
    if starts is not None:  # 24 bits: each is a float32
        shares = (stream(starts, rows.shape[1], 32) >> np.uint32(8)).astype(np.float32)
        shares *= np.float32(2**-24)
    low += shares < exact - low
    stored[:, _SCALE_BYTES:] = low
    scales[~is_finite] = np.nan
    stored[:, :_SCALE_BYTES] = scales[:, None].view(np.int8)

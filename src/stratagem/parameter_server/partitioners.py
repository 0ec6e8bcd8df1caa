"""Partitioners: split large variables over parameter servers, by consecutive rows of axis 0.

Source: TF 2.21 sharded_variable.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from stratagem.errors import check_number, invalid

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

__all__ = [
    "FixedShardsPartitioner",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Partitioner",
]


class Partitioner(Protocol):
    """Returns the number of shards of a variable; any function with this signature works.

    Example:
        >>> def in_halves(shape, dtype, axis=0):
        ...     return [2 if index == axis else 1 for index in range(len(shape))]
        >>> in_halves((1000, 16), "float32")
        [2, 1]

    Source: TF 2.21 sharded_variable.py, Partitioner.
    """

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis.

        Args:
            shape: shape of the whole variable.
            dtype: its dtype.
            axis: axis to split along.

        Returns:
            One number per axis, 1 for each except `axis`.
        """
        ...


@dataclasses.dataclass(frozen=True)
class FixedShardsPartitioner:
    """Splits every variable into the same number of shards, or into its rows if there are fewer.

    Args:
        num_shards: number of shards.

    Raises:
        ValueError: `num_shards` is not a positive int.

    Example:
        >>> sg.partitioners.FixedShardsPartitioner(2)((10, 3), "float32")
        [2, 1]

    Source: TF 2.21 sharded_variable.py, FixedShardsPartitioner.
    """

    num_shards: int

    def __post_init__(self) -> None:
        check_number("FixedShardsPartitioner", num_shards=self.num_shards)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        return _shard_counts(shape, axis, self.num_shards)


@dataclasses.dataclass(frozen=True)
class MinSizePartitioner:
    """Splits a variable into as many shards as possible of at least a minimum size.

    Args:
        min_shard_bytes: approximate minimum size of a shard in bytes.
        max_shards: maximum number of shards.
        bytes_per_string: accepted for compatibility; variables here hold no strings.

    Raises:
        ValueError: an argument is not a positive int.

    Example:
        >>> partitioner = sg.partitioners.MinSizePartitioner(min_shard_bytes=20000, max_shards=8)
        >>> partitioner((100, 256), "float32")
        [6, 1]

    Source: TF 2.21 sharded_variable.py, MinSizePartitioner.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        check_number("MinSizePartitioner", **dataclasses.asdict(self))

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        fitting = math.ceil(_size_bytes(shape, dtype) / self.min_shard_bytes)
        return _shard_counts(shape, axis, min(self.max_shards, fitting))


@dataclasses.dataclass(frozen=True)
class MaxSizePartitioner:
    """Splits a variable into as few shards as possible of at most a maximum size.

    Args:
        max_shard_bytes: maximum size of a shard in bytes; only a single row may exceed it.
        max_shards: maximum number of shards, which may then be larger; None for no limit.
        bytes_per_string: accepted for compatibility; variables here hold no strings.

    Raises:
        ValueError: an argument is not a positive int.

    Example:
        >>> sg.partitioners.MaxSizePartitioner(max_shard_bytes=20000)((100, 256), "float32")
        [6, 1]

    Source: TF 2.21 sharded_variable.py, MaxSizePartitioner.
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        numbers = dataclasses.asdict(self)
        check_number("MaxSizePartitioner", or_none=True, max_shards=numbers.pop("max_shards"))
        check_number("MaxSizePartitioner", **numbers)

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Returns the number of shards along each axis."""
        num_rows = shape[axis] if shape else 1
        row_bytes = _size_bytes(shape, dtype) / max(1, num_rows)
        rows_per_shard = max(1, math.floor(self.max_shard_bytes / row_bytes)) if row_bytes else 1
        num_shards = math.ceil(num_rows / rows_per_shard)
        return _shard_counts(shape, axis, min(num_shards, self.max_shards or num_shards))


def rows_of_shards(
    partitioner: Partitioner | None, shape: Sequence[int], dtype: DTypeLike, *, name: str
) -> list[int]:
    """Returns the number of rows of each shard of a variable.

    The first `size % shards` shards have one more row. Scalars are never split.

    Args:
        partitioner: the partitioner; None for one shard.
        shape: shape of the whole variable.
        dtype: its dtype.
        name: its name, for error messages.

    Returns:
        Positive ints that sum to the size of axis 0; a single number for a scalar (1) or an empty
        variable (0).

    Raises:
        ValueError: the partitioner returned something other than `[n, 1, 1, ...]` with n >= 1.
    """
    if not shape or partitioner is None or shape[0] == 0:
        return [shape[0] if shape else 1]
    answer = partitioner(tuple(shape), dtype)
    counts = list(answer) if isinstance(answer, Sequence) else [answer]  # pyright: ignore[reportUnnecessaryIsInstance]
    is_number = all(isinstance(count, int | np.integer) for count in counts)
    if not is_number or len(counts) != len(shape) or counts[0] < 1 or set(counts[1:]) - {1}:
        raise invalid(
            f"The partitioner returned {answer!r} for variable {name!r} of shape {tuple(shape)}.",
            expected=f"a list of {len(shape)} ints: at least 1 for axis 0, and 1 for every "
            "other axis.",
            fix="return [n, 1, 1, ...].",
        )
    num_shards = min(int(counts[0]), shape[0])
    rows, more = divmod(shape[0], num_shards)
    return [rows + (shard < more) for shard in range(num_shards)]


def _shard_counts(shape: Sequence[int], axis: int, num_shards: int) -> list[int]:
    counts = [1] * len(shape)
    if shape:
        counts[axis] = max(1, min(shape[axis], num_shards))
    return counts


def _size_bytes(shape: Sequence[int], dtype: DTypeLike) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize

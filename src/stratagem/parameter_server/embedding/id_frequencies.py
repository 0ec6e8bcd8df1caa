"""Frequencies of the ids of a table: distinct rows of a step, and what a cache of rows finds."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.errors import explain

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


# Ranks of a law are counted one by one up to here, and in groups of nearly equal ones after it.
_SINGLE_RANKS = 1 << 12
_GROUPED_RANKS = 1 << 12
_HALVINGS = 50


@dataclasses.dataclass(frozen=True, eq=False)
class IdFrequencies:
    """Ids of a step, and how often each occurs.

    Args:
        ids_per_step: number of ids of a step, in the batches of all replicas of a worker.
        counts: occurrences of id 0, 1, 2, ... in a sample; None for a law.
        exponent: exponent of Zipf's law: the id of rank r occurs in proportion to `r**-exponent`.
            0 for ids that are equally likely. Popular ids are spread over the table.

    Raises:
        ValueError: no ids, a negative exponent, or counts without an occurrence.

    Example:
        >>> frequencies = sg.embedding.IdFrequencies(10_000, exponent=1.0)
        >>> round(frequencies.distinct(1_000_000))
        5346

    Source: specific to Stratagem.
    """

    ids_per_step: int
    counts: ArrayLike | None = None
    exponent: float = 0.0

    def __post_init__(self) -> None:
        if self.ids_per_step < 1 or self.exponent < 0:
            raise ValueError(
                explain(
                    f"IdFrequencies received ids_per_step={self.ids_per_step!r} and "
                    f"exponent={self.exponent!r}.",
                    expected="at least one id, and an exponent of 0 or more.",
                    fix="pass the number of ids that a step looks up.",
                )
            )
        if self.counts is not None:
            counts = np.asarray(self.counts)
            if counts.ndim != 1 or not counts.size or counts.min() < 0 or not counts.any():
                raise ValueError(
                    explain(
                        f"IdFrequencies received counts of shape {counts.shape}.",
                        expected="one count for each id, 0 or more, and at least one above 0.",
                        fix="pass np.bincount(ids) of a sample, or omit counts.",
                    )
                )

    def distinct(self, num_rows: int) -> float:
        """Returns the expected number of distinct rows of a step.

        Args:
            num_rows: rows of the table.

        Returns:
            A number between 1 and both `num_rows` and `ids_per_step`.
        """
        return self.bins(num_rows).distinct(self.ids_per_step)

    def pulled(self, num_rows: int, *, max_rows: float, max_age_steps: int) -> float:
        """Returns the expected rows of a step that are not in a `RowCache` of the worker.

        The cache must keep rows that the worker trains (`reads_own_updates=False`).

        Args:
            num_rows: rows of the table.
            max_rows: as for `RowCache`.
            max_age_steps: as for `RowCache`.

        Returns:
            A number of rows, `distinct` of them without a cache.
        """
        return self.bins(num_rows).pulled(self.ids_per_step, max_rows, max_age_steps)

    def shard_shares(self, num_rows: int, num_shards: int) -> np.ndarray[Any, Any]:
        """Returns the part of a step's distinct rows that each shard of consecutive rows has.

        Args:
            num_rows: rows of the table.
            num_shards: shards of about equal numbers of rows.

        Returns:
            Parts that sum to 1.
        """
        if self.counts is None:
            return np.full(num_shards, 1 / num_shards)
        looked_up = _looked_up(_shares(self.counts, num_rows), self.ids_per_step)
        parts = np.array([part.sum() for part in np.array_split(looked_up, num_shards)])
        return parts / parts.sum()

    def bins(self, num_rows: int) -> RankBins:
        """Returns the rows in groups of equal probability.

        Args:
            num_rows: rows of the table.

        Returns:
            The groups.

        Raises:
            ValueError: more counts than rows.
        """
        if self.counts is not None:
            shares = _shares(self.counts, num_rows)
            return RankBins(np.ones(len(shares)), shares)
        edges = np.arange(min(num_rows, _SINGLE_RANKS) + 1)
        if num_rows > _SINGLE_RANKS:
            more = np.geomspace(_SINGLE_RANKS, num_rows, _GROUPED_RANKS).astype(np.int64)
            edges = np.unique(np.concatenate([edges, more]))
        widths, middles = np.diff(edges), (edges[:-1] + edges[1:] + 1) / 2
        weights = middles.astype(float) ** -self.exponent
        return RankBins(widths, weights / (widths * weights).sum())


@dataclasses.dataclass(frozen=True, eq=False)
class RankBins:
    """Groups of rows: their numbers of rows, and the probability of each row of a group."""

    widths: np.ndarray[Any, Any]
    probabilities: np.ndarray[Any, Any]

    def distinct(self, num_ids: int) -> float:
        """Returns the expected number of distinct rows among `num_ids` ids."""
        return float((self.widths * _looked_up(self.probabilities, num_ids)).sum())

    def pulled(self, num_ids: int, max_rows: float, max_age_steps: float) -> float:
        """Returns the rows of a step that a cache does not have.

        A row that a step looks up with probability q is read, then found for `max_age_steps`, and
        read again by the next lookup after these: once in `max_age_steps + 1 / q` steps. If the
        cache is too small for all rows of that age, its ring drops them at a lower one.
        """
        looked_up = _looked_up(self.probabilities, num_ids)
        chance, widths = looked_up[looked_up > 0], self.widths[looked_up > 0]

        def read(age_steps: float) -> float:
            return float((widths / (age_steps + 1 / chance)).sum())

        if max_age_steps * read(max_age_steps) <= max_rows:
            return read(max_age_steps)
        low, high = 0.0, float(max_age_steps)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if middle * read(middle) < max_rows else (low, middle)
        return read(low)


def _shares(counts: ArrayLike, num_rows: int) -> np.ndarray[Any, Any]:
    found = np.asarray(counts, float)
    if len(found) > num_rows:
        raise ValueError(
            explain(
                f"IdFrequencies has counts of {len(found):,} ids for a table of {num_rows:,} rows.",
                expected="at most one count for each row.",
                fix="count the ids of this table alone.",
            )
        )
    return np.pad(found / found.sum(), (0, num_rows - len(found)))


def _looked_up(probabilities: np.ndarray[Any, Any], num_ids: int) -> np.ndarray[Any, Any]:
    """Returns the probability that a row is among `num_ids` ids."""
    # log1p(-1) of a table of one row is -inf, as it should be.
    with np.errstate(divide="ignore"):
        return -np.expm1(num_ids * np.log1p(-probabilities))

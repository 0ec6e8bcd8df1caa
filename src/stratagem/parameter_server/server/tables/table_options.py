"""Options of a keyed table, as a client sends them in `ShardSpec.table`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import ndtri

from stratagem.errors import check_number, invalid
from stratagem.parameter_server.server.tables.row_formats import (
    GOLDEN,
    RowFormat,
    mix64,
    seeded,
    stream,
)
from stratagem.resources import checked_folder

# Policies of keyed tables: admission of rows, and eviction.


_MOST_CANDIDATES = 2**22


@dataclasses.dataclass(frozen=True)
class AfterSightings:
    """Makes a row in the n-th update with its key. Gradients of earlier ones are dropped.

    Args:
        sightings: number of updates.
        max_candidates: keys without a row that a server counts; it forgets the least recent ones
            beyond this limit, and their rows are then made later.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> sg.embedding.AfterSightings(sightings=2).sightings
        2

    Source: Monolith, its occurrence threshold.
    """

    sightings: int
    max_candidates: int = _MOST_CANDIDATES

    def __post_init__(self) -> None:
        check_number("AfterSightings", **dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True)
class WithProbability:
    """Makes a row with this probability in each update with its key. Others are dropped.

    Args:
        probability: in (0, 1].
        seed: chooses among the outcomes, which depend on the key and the update.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> sg.embedding.WithProbability(0.1).probability
        0.1

    Source: specific to Stratagem.
    """

    probability: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.probability <= 1:
            raise invalid(
                f"WithProbability received probability={self.probability!r}.",
                expected="a number above 0 and at most 1.",
                fix="omit the policy to make every row.",
            )


@dataclasses.dataclass(frozen=True)
class NotSeenFor:
    """Evicts a row that no update had for `steps` updates of its server, or up to 1/8 more.

    Args:
        steps: number of updates.

    Raises:
        ValueError: a number out of range.

    Example:
        >>> sg.embedding.NotSeenFor(steps=10_000).steps
        10000

    Source: Monolith, its expire time.
    """

    steps: int

    def __post_init__(self) -> None:
        check_number("NotSeenFor", steps=self.steps)


@dataclasses.dataclass(frozen=True)
class LeastFrequent:
    """Evicts rows with the fewest updates, then the least recent, when the table is full.

    Example:
        >>> sg.embedding.LeastFrequent()
        LeastFrequent()

    Source: TF Recommenders Addons 0.8, FrequencyRestrictPolicy.
    """


@dataclasses.dataclass(frozen=True)
class LeastRecent:
    """Evicts rows whose last update is the longest ago, when the table is full.

    Example:
        >>> sg.embedding.LeastRecent()
        LeastRecent()

    Source: TF Recommenders Addons 0.8, TimestampRestrictPolicy.
    """


Admission = AfterSightings | WithProbability
Eviction = NotSeenFor | LeastFrequent | LeastRecent

_POLICIES: dict[str, Callable[..., Any]] = {
    one.__name__: one
    for one in (AfterSightings, WithProbability, NotSeenFor, LeastFrequent, LeastRecent)
}


def policy_from(fields: Mapping[str, Any] | None) -> Any:
    """Returns the policy from its class name as `kind` and its fields; None for None."""
    if fields is None:
        return None
    arguments = dict(fields)
    return _POLICIES[arguments.pop("kind")](**arguments)


def are_drawn(policy: WithProbability, keys: np.ndarray, version: int) -> np.ndarray:
    """Returns True for each key whose row the update with this version makes."""
    start = np.array([version * GOLDEN & (2**64 - 1)], np.uint64)
    bits = mix64(seeded(keys, policy.seed) + start)
    return (bits >> np.uint64(11)) * 2.0**-53 < policy.probability


def victims(
    eviction: LeastFrequent | LeastRecent,
    counts: np.ndarray,
    seen: np.ndarray,
    is_evictable: np.ndarray,
    num_wanted: int,
) -> np.ndarray:
    """Returns the positions of the rows to evict: `num_wanted`, or all that are evictable.

    Equal rows are evicted in the order of their positions.
    """
    order = seen.astype(np.uint64)
    if isinstance(eviction, LeastFrequent):
        order |= counts.astype(np.uint64) << np.uint64(32)
    places = np.flatnonzero(is_evictable)
    if len(places) <= num_wanted:
        return places
    order = order[places]
    limit = np.partition(order, num_wanted - 1)[num_wanted - 1]
    is_chosen = order < limit
    equal = np.flatnonzero(order == limit)
    is_chosen[equal[: num_wanted - np.count_nonzero(is_chosen)]] = True
    return places[is_chosen]


# Initial rows of keyed tables, computed from the key: the same on any server and in any order.

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

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014).
    """

    kind: str = "constant"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0

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
        bits = stream(seeded(keys, self.seed), width, 32)
        if self.kind == "uniform":  # 24 bits: each is a float32
            numbers = (bits >> np.uint32(8)).astype(np.float32)
            numbers *= np.float32((self.b - self.a) / 2**24)
            numbers += np.float32(self.a)
            return numbers
        share = (bits + 0.5) / 2**32
        if self.kind == "truncated_normal":
            share = _BELOW_TWO + (1 - 2 * _BELOW_TWO) * share
        return self.a + self.b * ndtri(share)


@dataclasses.dataclass(frozen=True)
class TierOptions:
    """Memory for the rows of a table on each server, and the folder of the others.

    Args:
        memory_bytes: memory of rows and their optimizer slots on a server, in bytes. Keys are
            always in memory, and are not part of it: about 40 bytes for each row.
        folder: folder on the server's disk, which several tables and servers may share.

    Raises:
        ValueError: a size below 1, or no folder.

    Example:
        >>> sg.embedding.TierOptions(memory_bytes=2**30, folder="/disk/tables").memory_bytes
        1073741824

    Source: specific to Stratagem; PERSIA and HugeCTR's hierarchical parameter server have tiers.
    """

    memory_bytes: int
    folder: str

    def __post_init__(self) -> None:
        check_number("TierOptions", 1.0, memory_bytes=self.memory_bytes)  # 1e9, too
        checked_folder("folder", self.folder)


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """Initial rows, policies and size limit of the keyed rows of one server.

    Args:
        initializer: initial rows.
        admission: decides which keys get a row; None for all.
        eviction: decides which rows are evicted; None for none.
        max_rows: most rows of this server; None for as many as fit in memory. A full table without
            `LeastFrequent` and `LeastRecent` refuses more keys.
        allow_row_export: True if keys may be exported with their rows.
        tiers: memory limit beyond which rows are on disk; None for all in memory.
        storage_dtype: dtype in which rows are held, see `RowFormat`; None for that of the table.

    Raises:
        ValueError: a limit below 1.
    """

    initializer: RowInitializer
    admission: Admission | None = None
    eviction: Eviction | None = None
    max_rows: int | None = None
    allow_row_export: bool = False
    tiers: TierOptions | None = None
    storage_dtype: str | None = None

    def __post_init__(self) -> None:
        check_number("A keyed table", or_none=True, max_rows=self.max_rows)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> TableOptions:
        """Returns the options from JSON fields; None in these stands for a default."""
        given = {name: value for name, value in fields.items() if value is not None}
        tiers = given.get("tiers")
        made: dict[str, Any] = {
            "initializer": RowInitializer(**given.get("initializer", {})),
            "admission": policy_from(given.get("admission")),
            "eviction": policy_from(given.get("eviction")),
            "tiers": None if tiers is None else TierOptions(**tiers),
        }
        return cls(**{**given, **made})

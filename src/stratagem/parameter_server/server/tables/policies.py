"""Policies of keyed tables: admission of rows, and eviction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stratagem.errors import explain
from stratagem.parameter_server.server.tables.row_formats import GOLDEN, mix64, seeded

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
        _require(self, self.sightings >= 1 and self.max_candidates >= 1, "numbers of at least 1")


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
        _require(self, 0 < self.probability <= 1, "a probability above 0 and at most 1")


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
        _require(self, self.steps >= 1, "at least 1 step")


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
    """Returns the policy from its class name as `kind` and its fields; None for None.

    Raises:
        ValueError: no such policy.
    """
    if fields is None:
        return None
    arguments = dict(fields)
    policy = _POLICIES.get(arguments.pop("kind", ""))
    if policy is None:
        raise ValueError(
            explain(
                f"A keyed table has the policy {fields.get('kind')!r}.",
                expected=f"one of {sorted(_POLICIES)}.",
                fix="run the same Stratagem version in all processes.",
            )
        )
    return policy(**arguments)


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


def _require(policy: Any, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ValueError(
            explain(
                f"{policy} has a number out of range.",
                expected=f"{expected}.",
                fix="omit the policy to make every row, or to keep it.",
            )
        )

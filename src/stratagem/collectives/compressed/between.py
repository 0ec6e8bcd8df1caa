"""Compressed sums of one array per island, of which each replica of the island sends a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from stratagem.collectives.compressed.sums import State, compressed_sums
from stratagem.collectives.islands import IslandSums
from stratagem.compression import Compression, PowerSGD

__all__ = ["compressed_between"]


def compressed_between(
    setting: Compression,
    arrays: Sequence[jax.Array],
    states: Sequence[State],
    sums: IslandSums,
    *,
    step: Any,
) -> tuple[list[jax.Array], list[State]]:
    """Returns the sums of arrays over islands, and the next state of each.

    A state's "error" is a replica's part of the island's: the replicas of an island have equal
    ones, so that the sum over all replicas is what no island has sent yet.

    PowerSGD needs whole matrices: each replica of an island sends the factors, which are small.

    Args:
        setting: how the arrays are sent.
        arrays: the island's, equal on its replicas.
        states: as for `compressed_sums`.
        sums: the islands, as seen from this replica.
        step: number of the step.
    """
    size = sums.size
    errors = [state["error"] * size if "error" in state else None for state in states]
    factors = [state.get("factor") for state in states]
    is_cut = size > 1 and not isinstance(setting, PowerSGD)
    cut = sums.part if is_cut else _as_it_is
    found, news = compressed_sums(
        setting,
        [cut(array) for array in arrays],
        [
            _state(None if error is None else cut(error), factor)
            for error, factor in zip(errors, factors, strict=True)
        ],
        sums.between,
        replica_id=sums.island_id,
        step=step,
    )
    totals, new_states = list[jax.Array](), list[State]()
    for total, new, array in zip(found, news, arrays, strict=True):
        totals.append(sums.equal(total, array) if is_cut else sums.sent_equal(total))
        error, factor = new.get("error"), new.get("factor")
        if error is not None:
            error = (sums.whole(error, array) if is_cut else error) / size
        new_states.append(_state(error, None if factor is None else sums.sent_equal(factor)))
    return totals, new_states


def _as_it_is(array: Any) -> Any:
    return array


def _state(error: Any, factor: Any) -> dict[str, Any]:
    state = {"error": error, "factor": factor}
    return {name: value for name, value in state.items() if value is not None}

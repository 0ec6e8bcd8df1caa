"""Sums of one array per island, compressed or not: each replica of the island sends a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from stratagem.devices.collectives.all_reduce import joined, split_into_shards
from stratagem.devices.collectives.islands import Islands
from stratagem.devices.compression import Compression, PowerSGD
from stratagem.execution.communicator import Communicator
from stratagem.execution.compressed.sums import State, compressed_sums


class IslandSums:
    """Sums of one array per island, as seen from one replica of it.

    All replicas of an island have the same array. Each sends a part of it to the replicas of its
    place in the other islands, so that an island sends it once.

    Args:
        islands: the islands.
        communicator: that of all replicas.
        replica_id: ID of this replica among all.
    """

    def __init__(self, islands: Islands, communicator: Communicator, replica_id: Any) -> None:
        self.size = islands.size
        self._inside = communicator.among(islands.members)
        self.between = communicator.among(islands.peers, packs=True)
        self.island_id = replica_id // islands.size
        self._place = replica_id % islands.size

    def by_parts(
        self, add: Callable[[Sequence[Any]], Sequence[Any]], arrays: Sequence[Any]
    ) -> list[Any]:
        """Returns sums between islands, equal on all replicas.

        Args:
            add: returns the sums of arrays over the replicas of `between`.
            arrays: the island's, equal on its replicas.
        """
        if self.size == 1:
            return list(add(arrays))
        sums = add([self.part(array) for array in arrays])
        return [self.equal(total, like) for total, like in zip(sums, arrays, strict=True)]

    def part(self, array: jax.Array) -> jax.Array:
        """Returns this replica's part of an array, flat and padded with zeros."""
        return split_into_shards(array, self.size)[self._place]

    def whole(self, part: jax.Array, like: jax.Array) -> jax.Array:
        """Joins the parts of the replicas of this island."""
        if not like.size:
            return like
        flat = self._gather(part)
        return flat[: like.size].reshape(like.shape)

    def equal(self, part: jax.Array, like: jax.Array) -> jax.Array:
        """Joins the parts of the replicas of this island; parts of a place are equal on all."""
        if not like.size:
            return like
        return joined(self._gather, part)[: like.size].reshape(like.shape)

    def _gather(self, part: jax.Array) -> Any:
        return self._inside.all_gather(part, 0, None)

    def sent_equal(self, array: jax.Array) -> jax.Array:
        """Returns an array that the replicas of a place have in common, equal on all replicas."""
        return array if self.size == 1 else self.equal(self.part(array), jnp.asarray(array))


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

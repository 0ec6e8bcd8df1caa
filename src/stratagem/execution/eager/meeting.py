"""Exchange of collective requests between the eager replicas of several processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from stratagem.group.current import current_group
from stratagem.variables.regrouping import is_array

Answer = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass
class CollectiveRequest:
    """A collective call of one replica; `kind` is compared between replicas."""

    kind: str
    value: Any
    answer: Answer  # maps all replicas' values to results


def by_group(groups: Sequence[Sequence[int]], answer: Answer, values: list[Any]) -> list[Any]:
    """Returns the replies to all replicas where each group of them gets an answer of its own."""
    replies: list[Any] = [None] * len(values)
    for group in groups:
        answers = answer([values[replica_id] for replica_id in group])
        for replica_id, reply in zip(group, answers, strict=True):
            replies[replica_id] = reply
    return replies


def asked_by_all(kinds: list[str], values: list[Any]) -> tuple[list[str], list[Any]]:
    """Returns the calls and values of all replicas, or no values if the calls differ.

    A collective of all processes. Only arrays are exchanged; other objects are assumed equal.
    """
    group = current_group()
    assert group is not None
    own: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        leaves = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
        own.append((kind, [np.asarray(leaf) for leaf in leaves]))
    rows = [row for part in group.exchange("a meeting of eager replicas", own) for row in part]
    all_kinds = [kind for kind, _ in rows]
    if len(set(all_kinds)) > 1:
        return all_kinds, []
    own_leaves, structure = jax.tree.flatten(values[0])
    all_values: list[Any] = []
    for _, arrays in rows:
        remaining = iter(arrays)
        leaves = [next(remaining) if is_array(leaf) else leaf for leaf in own_leaves]
        all_values.append(jax.tree.unflatten(structure, leaves))
    return all_kinds, all_values


def self_transposed(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a reduction differentiable: its gradient is the same reduction of the cotangent."""

    @jax.custom_vjp
    def differentiable(value: object) -> Any:
        return reduce(value)

    differentiable.defvjp(
        lambda value: (reduce(value), None), lambda _, incoming: (reduce(incoming),)
    )
    return differentiable

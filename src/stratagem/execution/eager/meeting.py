"""Exchange of collective requests between the eager replicas of several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from stratagem.process_group import current_group
from stratagem.values.regrouping import is_array

__all__ = ["asked_by_all", "self_transposed"]


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

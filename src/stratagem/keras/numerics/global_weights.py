"""Global weights of replicas that train apart: the next ones, and what replicas take of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from stratagem.devices.local_updates import DiLoCo, LocalUpdates
from stratagem.execution.compressed.between import IslandSums, compressed_between
from stratagem.execution.context.replica import ReplicaContext
from stratagem.execution.tracing.functionalize import on_global_model
from stratagem.options import ReduceOp
from stratagem.variables.compressed import is_compressed


def read_global(trained: Sequence[Any]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Returns the global value of each variable, and its state between synchronizations."""
    with on_global_model():
        values = [one.value for one in trained]
        states = [{name: one.value for name, one in each.outer_state.items()} for each in trained]
    return values, states


def assign_global(
    trained: Sequence[Any], values: Sequence[Any], states: Sequence[dict[str, Any]]
) -> None:
    """Sets what `read_global` reads."""
    for variable, whole, state in zip(trained, values, states, strict=True):
        with on_global_model():
            variable.assign(whole)
        for name, value in state.items():
            variable.outer_state[name].assign(value)


def next_globals(
    trained: list[Any],
    own: Sequence[Any],
    globals_: Sequence[Any],
    states: list[dict[str, Any]],
    method: LocalUpdates,
    context: ReplicaContext,
    step: Any,
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Sums the changes of the replicas; returns the next global values and states."""
    changes = [new - old for new, old in zip(own, globals_, strict=True)]
    mean, errors = _mean_changes(trained, changes, states, method, context, step)
    found = [
        _next_global(old, change, state, method)
        for old, change, state in zip(globals_, mean, states, strict=True)
    ]
    news = [{**state, **error} for (_, state), error in zip(found, errors, strict=True)]
    return [new for new, _ in found], news


def mixed(own: Sequence[Any], globals_: Sequence[Any], method: LocalUpdates) -> list[Any]:
    """Returns the next own values of a replica that takes global ones."""
    share = method.mixing
    return [
        (share * mine + (1 - share) * whole).astype(mine.dtype) if share else whole
        for mine, whole in zip(own, globals_, strict=True)
    ]


def _mean_changes(
    trained: list[Any],
    changes: list[Any],
    states: list[Any],
    method: LocalUpdates,
    context: ReplicaContext,
    step: Any,
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Returns the mean change of each variable over islands, and the next compression state."""
    islands = context.strategy.islands
    sums = IslandSums(islands, context.communicator, context.replica_id_in_sync_group)
    kept = [set(state) & {"error", "factor"} for state in states]
    compression: Any = method.compression
    totals: list[Any] = [None] * len(changes)
    news: list[dict[str, Any]] = [{} for _ in changes]
    places = [place for place, one in enumerate(trained) if is_compressed(one, compression)]
    if places:
        found, new_states = compressed_between(
            compression,
            [changes[place] for place in places],
            [{name: states[place][name] for name in kept[place]} for place in places],
            sums,
            step=step,
        )
        for place, total, state in zip(places, found, new_states, strict=True):
            totals[place], news[place] = total, dict(state)
    others = [place for place in range(len(changes)) if place not in places]
    add = functools.partial(sums.between.all_reduce_many, ReduceOp.SUM)
    whole = sums.by_parts(add, [changes[one] for one in others])
    for place, total in zip(others, whole, strict=True):
        totals[place] = total
    return [total / islands.count for total in totals], news


def _next_global(
    old: Any, change: Any, state: dict[str, Any], method: LocalUpdates
) -> tuple[Any, dict[str, Any]]:
    """Returns the next global value of a variable, and the state of the outer optimizer."""
    if not isinstance(method, DiLoCo):
        return old + change, state
    before = state["outer_momentum"]
    change = change.astype(before.dtype)
    momentum = method.outer_momentum * before + change
    step = method.outer_momentum * momentum + change
    new = (old.astype(before.dtype) + method.outer_learning_rate * step).astype(old.dtype)
    return new, {**state, "outer_momentum": momentum}

"""Training on local copies of the weights, which replicas synchronize every few steps.

A trained variable holds the global model. Its local copy holds each replica's own weights, which
the variable stands for in the replica's training steps. The replicas of an island have equal ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import keras

from stratagem.collectives.compressed.between import compressed_between
from stratagem.collectives.islands import IslandSums
from stratagem.context import ReplicaContext, get_strategy
from stratagem.execution import on_global_model
from stratagem.keras.numerics.compressed_gradients import state_variables
from stratagem.keras.numerics.sync_rounds import SyncRounds, add_round_end
from stratagem.keras.variables.annotations import annotated_variables
from stratagem.local_updates import DiLoCo, LocalUpdates, fragments_of
from stratagem.options import ReduceOp
from stratagem.profiling.scopes import every_steps
from stratagem.variables import home_of, is_compressed

__all__ = ["synchronize", "with_local_copies"]


def with_local_copies(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.build` that makes local copies of the variables."""

    @functools.wraps(original)
    def build(self: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]) -> Any:
        variables = list(variables)
        result = original(self, variables)
        home = home_of(variables[0]) if variables else None
        method = None if home is None else home.strategy.local_updates
        if home is None or method is None or home.strategy.islands is None:
            return result
        if get_strategy() is home.strategy:
            _add_copies(self, variables, method)
        else:
            with home.strategy.scope():
                _add_copies(self, variables, method)
        return result

    return build


def synchronize(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    method: LocalUpdates,
    context: ReplicaContext,
) -> None:
    """Synchronizes the fragments that are due after this step. Call after the local update."""
    trained = [one for one in variables if getattr(one, "local_copy", None) is not None]
    step = cast("Any", optimizer.iterations).value
    for fragment, offset in fragments_of(trained, method):
        rounds = SyncRounds(optimizer, method, offset)
        _synchronize_fragment(fragment, method, context, step, rounds)


def _synchronize_fragment(
    trained: list[Any],
    method: LocalUpdates,
    context: ReplicaContext,
    step: Any,
    rounds: SyncRounds,
) -> None:
    with on_global_model():
        globals_ = [one.value for one in trained]
        states = [{name: one.value for name, one in each.outer_state.items()} for each in trained]
    own = [one.local_copy.value for one in trained]

    def together() -> Any:
        changes = [new - old for new, old in zip(own, globals_, strict=True)]
        mean, errors = _mean_changes(trained, changes, states, method, context, step)
        found = [
            _next_global(old, change, state, method)
            for old, change, state in zip(globals_, mean, states, strict=True)
        ]
        news = [{**state, **error} for (_, state), error in zip(found, errors, strict=True)]
        return [new for new, _ in found], news

    is_sent = rounds.end_at(step)
    with every_steps(method.least_period):
        new_globals, new_states = jax.lax.cond(is_sent, together, lambda: (globals_, states))
    has_landed = rounds.end_at(step, method.overlap_steps)
    share = method.mixing
    new_own = jax.lax.cond(
        has_landed,
        lambda: [
            (share * mine + (1 - share) * whole).astype(mine.dtype) if share else whole
            for mine, whole in zip(own, new_globals, strict=True)
        ],
        lambda: own,
    )
    for variable, whole, local, state in zip(
        trained, new_globals, new_own, new_states, strict=True
    ):
        variable.local_copy.assign(local)
        with on_global_model():
            variable.assign(whole)
        for name, value in state.items():
            variable.outer_state[name].assign(value)


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


def _add_copies(optimizer: Any, variables: Sequence[Any], method: LocalUpdates) -> None:
    add_round_end(optimizer, method)
    compression: Any = method.compression
    for variable in variables:
        if variable.local_copy is not None or not _is_float(variable):
            continue
        shapes = dict.fromkeys(method.state_names, tuple(variable.shape))
        if is_compressed(variable, compression):
            shapes |= compression.state_shapes(tuple(variable.shape))
        state = state_variables(optimizer, variable, shapes)
        with annotated_variables(synchronization="on_read", aggregation="mean"):
            copy = optimizer.add_variable(
                tuple(variable.shape),
                initializer=_value_of(variable),
                dtype=variable.dtype,
                name=f"{variable.path.replace('/', '_')}_local_copy",
            )
        variable.keep_local_copy(copy, state)


def _value_of(variable: Any) -> Callable[..., Any]:
    def global_value(shape: object, dtype: object) -> Any:
        del shape, dtype
        with on_global_model():
            return variable.own_value()

    return global_value


def _is_float(variable: Any) -> bool:
    return jnp.issubdtype(jnp.dtype(variable.dtype), jnp.floating)

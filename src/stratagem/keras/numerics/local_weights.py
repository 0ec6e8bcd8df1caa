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

from stratagem.contexts import get_strategy
from stratagem.devices.local_updates import LocalUpdates, fragments_of
from stratagem.execution.context.replica import ReplicaContext
from stratagem.execution.tracing.functionalize import on_global_model
from stratagem.keras.numerics.compressed_gradients import state_variables
from stratagem.keras.numerics.fragment_sends import leave_sends
from stratagem.keras.numerics.global_weights import assign_global, mixed, next_globals, read_global
from stratagem.keras.numerics.sync_rounds import SyncRounds, add_round_end
from stratagem.keras.variables.annotations import annotated_variables
from stratagem.observe.profiling.scopes import every_steps
from stratagem.variables.compressed import is_compressed
from stratagem.variables.registry import home_of


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
    if leave_sends(optimizer, trained, method, context):
        return
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
    globals_, states = read_global(trained)
    own = [one.local_copy.value for one in trained]
    is_sent = rounds.end_at(step)
    with every_steps(method.least_period):
        new_globals, new_states = jax.lax.cond(
            is_sent,
            lambda: next_globals(trained, own, globals_, states, method, context, step),
            lambda: (globals_, states),
        )
    has_landed = rounds.end_at(step, method.overlap_steps)
    new_own = jax.lax.cond(has_landed, lambda: mixed(own, new_globals, method), lambda: own)
    for variable, local in zip(trained, new_own, strict=True):
        variable.local_copy.assign(local)
    assign_global(trained, new_globals, new_states)


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

"""Compressed gradients, and local copies of weights that replicas average every few steps.

A trained variable holds the global model. Its local copy holds each replica's own weights, which
the variable stands for in the replica's training steps. The replicas of an island have equal ones.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from stratagem.contexts import get_strategy
from stratagem.devices.local_updates import DiLoCo, LocalUpdates, QuadraticPeriod, fragments_of
from stratagem.errors import invalid
from stratagem.execution.communicator import IslandSums, compressed_between, compressed_sums
from stratagem.execution.replica_context import ReplicaContext
from stratagem.execution.tracing.functionalize import on_global_model
from stratagem.keras.patches import patches
from stratagem.keras.private import num_calls, track
from stratagem.keras.private import trainable_variables as built_variables
from stratagem.keras.variables.requests import annotated
from stratagem.observe.profiling import every_steps
from stratagem.options import ReduceOp
from stratagem.variables.distributed import is_indexed_slices
from stratagem.variables.layouts import is_compressed
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.devices.compression import Compression


_FACTOR_SEED = 20190531

# By optimizer and identity of the variable; None for variables whose gradients are sent whole.
_states: weakref.WeakKeyDictionary[Any, dict[int, dict[str, keras.Variable] | None]]
_states = weakref.WeakKeyDictionary()


def add_state(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> None:
    """Creates the errors of compressed gradients and the local copies that variables need.

    In the scope of their strategy; those that exist already stay.
    """
    home = home_of(variables[0]) if variables else None
    if home is None:
        return
    strategy = home.strategy
    compression = strategy.cross_device_ops.compression
    sends_compressed = compression is not None and strategy.num_replicas_in_sync > 1
    method = None if strategy.islands is None else strategy.local_updates
    if not sends_compressed and method is None:
        return
    with contextlib.nullcontext() if get_strategy() is strategy else strategy.scope():
        if sends_compressed:
            _add_errors(optimizer, variables, compression)
        if method is not None:
            _add_copies(optimizer, variables, method)


@patches(
    keras.optimizers.Optimizer,
    "load_own_variables",
    why="a file without the errors of compressed gradients or local copies leaves them as they are",
)
def loading_without_state(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.load_own_variables` that also reads files of other strategies."""

    @functools.wraps(original)
    def load(self: keras.optimizers.Optimizer, store: Mapping[str, Any]) -> Any:
        own = set(map(id, _own_state(self)))
        others = [one for one in self.variables if id(one) not in own]
        if own and len(store.keys()) == len(others):
            for place, variable in enumerate(others):
                variable.assign(store[f"{place}"])
            return None
        return original(self, store)

    return load


def _own_state(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the variables that `add_state` gave an optimizer."""
    states = [state for state in _states.get(optimizer, {}).values() if state is not None]
    found = [one for state in states for one in state.values()]
    for variable in built_variables(optimizer):
        if getattr(variable, "local_copy", None) is not None:
            found += [*variable.outer_state.values(), variable.local_copy]
    return [*found, _ends[optimizer]] if optimizer in _ends else found


def sums_of_compressed(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    grads: Sequence[Any],
    context: ReplicaContext,
) -> dict[int, Any]:
    """Returns the sums of those gradients that are sent compressed, by their place.

    Call in replica context. Assigns their state.
    """
    compression = context.strategy.cross_device_ops.compression
    if compression is None or context.num_replicas_in_sync == 1:
        return {}
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise _loss_scale_refused(compression)
    if any(id(one) not in _states.get(optimizer, {}) for one in variables):
        add_state(optimizer, variables)
    known = _states.get(optimizer, {})
    found = {
        place: state
        for place, (variable, grad) in enumerate(zip(variables, grads, strict=True))
        if (state := known.get(id(variable))) is not None
        and grad is not None
        and not is_indexed_slices(grad)
    }
    if not found:
        return {}
    places, states = list(found), list(found.values())
    sums, new_states = compressed_sums(
        compression,
        [grads[place] for place in places],
        [{name: one.value for name, one in state.items()} for state in states],
        context.communicator,
        replica_id=context.replica_id_in_sync_group,
        step=num_calls(optimizer).value,
    )
    for state, values in zip(states, new_states, strict=True):
        for name, value in values.items():
            state[name].assign(value)
    return dict(zip(places, sums, strict=True))


def _add_errors(optimizer: Any, variables: Sequence[Any], compression: Any) -> None:
    known = _states.setdefault(optimizer, {})
    for variable in variables:
        if id(variable) not in known:
            shapes = compression.state_shapes(tuple(variable.shape))
            is_sent = is_compressed(variable, compression)
            known[id(variable)] = _state_variables(optimizer, variable, shapes) if is_sent else None


def _state_variables(
    optimizer: Any, variable: Any, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Creates the state of one variable's sums in an optimizer, by name.

    Args:
        optimizer: a Keras optimizer, which saves and restores the state.
        variable: the trained variable.
        shapes: shape of each part of the state; an "error" is each replica's own.
    """
    made: dict[str, Any] = {}
    for name, shape in shapes.items():
        # The errors of a checkpoint are their sum, which other numbers of replicas can share.
        kind = ("on_read", "sum") if name == "error" else ("auto", "none")
        first = keras.initializers.RandomNormal(stddev=1.0, seed=_FACTOR_SEED)
        with annotated(kind=kind):
            made[name] = optimizer.add_variable(
                shape,
                initializer=first if name == "factor" else "zeros",
                dtype="float32",
                name=f"{variable.path.replace('/', '_')}_{name}",
            )
    return made


def _loss_scale_refused(compression: Compression) -> ValueError:
    return invalid(
        f"A LossScaleOptimizer was applied with compression={compression}.",
        expected="gradients of one scale: errors of a step are added to the next one's, and "
        "the loss scale changes between them.",
        fix='train in bfloat16, keras.config.set_dtype_policy("mixed_bfloat16"), which needs '
        "no loss scale, or leave the compression out.",
    )


# Global weights of replicas that train apart: the next ones, and what replicas take of them.


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


# Rounds of local updates: the steps from one synchronization to the next.
#
# A round of a fixed period ends at a multiple of it. The end of a round of `QuadraticPeriod` is a
# variable of the optimizer, set when the round begins and equal on all replicas.

# The longest round: a float32 has it exactly, and a sum with a step is an int32.
_MOST_STEPS = 1_000_000_000
# A quotient of rates such as 0.2 / 0.1 in float32 may be a little less than the whole number.
_ROUNDING = 1 + 1e-5

# The variable with the last step of the current round, by optimizer.
_ends: weakref.WeakKeyDictionary[Any, keras.Variable] = weakref.WeakKeyDictionary()


def add_round_end(optimizer: keras.optimizers.Optimizer, method: LocalUpdates) -> None:
    """Creates the variable with the end of the current round, if a rule decides it."""
    if isinstance(method.period, QuadraticPeriod) and optimizer not in _ends:
        made: Any = optimizer.add_variable((), initializer="zeros", dtype="int32", name="round_end")
        _ends[optimizer] = made


def begin_round(optimizer: keras.optimizers.Optimizer, method: LocalUpdates) -> None:
    """Sets the end of a round that begins with this step. Call before the optimizer's update."""
    if not isinstance(method.period, QuadraticPeriod):
        return
    end: Any = _ends[optimizer]
    start, _ = _updates(optimizer)
    rate: Any = keras.ops.convert_to_tensor(optimizer.learning_rate)
    found = _end_of_round(method.period, start, rate, method.warmup_steps)
    end.assign(jnp.where(start >= end.value, found, end.value))


def _end_of_round(rule: QuadraticPeriod, start: Any, rate: ArrayLike, warmup_steps: int) -> Any:
    ratio = rule.growth / jnp.asarray(rate, jnp.float32)
    wanted = jnp.floor(ratio * ratio * _ROUNDING)
    steps = jnp.clip(wanted, rule.base, _MOST_STEPS).astype(jnp.int32)
    steps = jnp.where(start < warmup_steps, 1, steps)
    end = start + steps
    if rule.total_steps is None:
        return end
    return jnp.where(start < rule.total_steps, jnp.minimum(end, rule.total_steps), end)


def _updates(optimizer: keras.optimizers.Optimizer) -> tuple[Any, Any]:
    """Returns how many updates were applied, and True, traced, if the last call applied one.

    With accumulation of gradients other calls only add to them: no round ends with one.
    """
    count = num_calls(optimizer).value
    calls_per_update = optimizer.gradient_accumulation_steps or 1
    return count // calls_per_update, count % calls_per_update == 0


def _is_round_end(
    optimizer: keras.optimizers.Optimizer,
    method: LocalUpdates,
    offset: int,
    step: Any,
    late_steps: int = 0,
) -> Any:
    """Returns True, traced, if a round ended `late_steps` before a step, the current one.

    Rounds of a fixed period end `offset` steps after its multiples.
    """
    if isinstance(method.period, QuadraticPeriod):
        return step == cast("Any", _ends[optimizer]).value
    ended = step - late_steps
    is_end = ((ended - offset) % method.least_period == 0) & (ended >= 1)
    return is_end | (step <= method.warmup_steps)


def synchronize(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[Any],
    method: LocalUpdates,
    context: ReplicaContext,
) -> None:
    """Synchronizes the fragments that are due after this step. Call after the local update."""
    trained = [one for one in variables if getattr(one, "local_copy", None) is not None]
    step, is_update = _updates(optimizer)
    calls_per_round = method.least_period * (optimizer.gradient_accumulation_steps or 1)
    for fragment, offset in fragments_of(trained, method):
        is_sent = is_update & _is_round_end(optimizer, method, offset, step)
        has_landed = is_update & _is_round_end(
            optimizer, method, offset, step, method.overlap_steps
        )
        with every_steps(calls_per_round):
            _synchronize_fragment(fragment, method, context, step, is_sent, has_landed)


def _synchronize_fragment(
    trained: list[Any],
    method: LocalUpdates,
    context: ReplicaContext,
    step: Any,
    is_sent: Any,
    has_landed: Any,
) -> None:
    globals_, states = read_global(trained)
    own = [one.local_copy.value for one in trained]
    new_globals, new_states = jax.lax.cond(
        is_sent,
        lambda: next_globals(trained, own, globals_, states, method, context, step),
        lambda: (globals_, states),
    )
    new_own = jax.lax.cond(has_landed, lambda: mixed(own, new_globals, method), lambda: own)
    for variable, local in zip(trained, new_own, strict=True):
        variable.local_copy.assign(local)
    assign_global(trained, new_globals, new_states)


def _add_copies(optimizer: Any, variables: Sequence[Any], method: LocalUpdates) -> None:
    add_round_end(optimizer, method)
    compression: Any = method.compression
    tracked = set(map(id, optimizer.variables))
    for variable in variables:
        if not _is_float(variable):
            continue
        if variable.local_copy is not None:  # of an optimizer before, after another `compile`
            if id(variable.local_copy) not in tracked:
                track(optimizer, [*variable.outer_state.values(), variable.local_copy])
            continue
        shapes = dict.fromkeys(method.state_names, tuple(variable.shape))
        if is_compressed(variable, compression):
            shapes |= compression.state_shapes(tuple(variable.shape))
        state = _state_variables(optimizer, variable, shapes)
        with annotated(kind=("on_read", "mean")):
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

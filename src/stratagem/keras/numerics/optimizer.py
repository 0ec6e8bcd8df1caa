"""Optimizers over replicas: gradients are summed once, then clipped and applied on every replica.

The update itself runs in update context, where assignments are direct.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental.sparse import JAXSparse

from stratagem import contexts as stack
from stratagem.contexts import get_strategy, has_strategy
from stratagem.devices.local_updates import LocalUpdates
from stratagem.errors import explain, invalid
from stratagem.execution.lookups import is_worth_rows, rows_to_update, with_updated_rows
from stratagem.execution.replica_context import ReplicaContext, get_replica_context
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope, note_optimizer
from stratagem.keras.numerics.local_weights import (
    add_state,
    begin_round,
    sums_of_compressed,
    synchronize,
)
from stratagem.keras.numerics.step_mode import (
    StepMode,
    current_mode,
    example_fraction,
    in_step,
    is_analyzing,
    scaled,
    shares_batches,
    step_state,
    terms_of,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import trainable_variables as built_variables
from stratagem.keras.variables.creation import adopt_optimizer
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.options import ReduceOp
from stratagem.variables.distributed import (
    IndexedSlices,
    PerReplica,
    is_indexed_slices,
    without_mirrored,
)
from stratagem.variables.layouts import is_remote
from stratagem.variables.registry import home_of

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy

# Gradients of replicas that train apart: those of their island.


def island_gradients(grads: Sequence[Any], context: ReplicaContext) -> list[Any]:
    """Returns gradients of the mean loss over the examples of this replica's island.

    In `fit` losses are shares of that mean, or means over a replica's own examples. In a loop of
    one's own a gradient is a part of the sum over all replicas, as for any strategy, and the sum
    of an island is scaled.

    Args:
        grads: this replica's gradients: arrays, rows or None.
        context: of this replica, among all replicas.
    """
    island, mode = context.island, current_mode()
    if mode is StepMode.MEAN and island.num_replicas_in_sync > 1:
        grads = [_times(grad, lambda dtype: example_fraction(island, dtype)) for grad in grads]
    sums = list(grads) if island.num_replicas_in_sync == 1 else _sums(grads, island, {})
    if mode is not StepMode.OWN:
        return sums
    return [_times(grad, lambda dtype: _inverse_fraction(context, dtype)) for grad in sums]


def _inverse_fraction(context: ReplicaContext, dtype: Any) -> Any:
    """Returns the examples of all replicas divided by those of the island; 0 without examples."""
    island = context.island
    if not context.batch.is_padded or not context.batch.has_examples:
        return jnp.asarray(context.num_replicas_in_sync / island.num_replicas_in_sync, dtype)
    own = jnp.asarray(island.global_num_examples, jnp.float32)
    whole = jnp.asarray(context.global_num_examples, jnp.float32)
    return jnp.where(own == 0, 0, whole / jnp.maximum(own, 1)).astype(dtype)


def _times(grad: Any, factor: Callable[[Any], jax.Array]) -> Any:
    """Returns a gradient times `factor(dtype)`.

    Without examples the gradient is 0, even where a loss of none is not a number.
    """

    def times(part: jax.Array) -> jax.Array:
        by = factor(part.dtype)
        return jnp.where(by == 0, jnp.zeros_like(part), part * by)

    return scaled(grad, times)


# Row-wise optimizer updates of tables, used if rows without a gradient would not change.
#
# A table with row lookups may be far too large to update whole in every step.

_leaves_rows: weakref.WeakKeyDictionary[Any, dict[int, bool]] = weakref.WeakKeyDictionary()
_Apply = Callable[[Any, list[Any], Any], Any]


def apply_with_rows(
    apply: _Apply,
    optimizer: keras.optimizers.Optimizer,
    grads: Sequence[Any],
    variables: Sequence[Any] | None,
) -> Any:
    """Applies gradients summed over replicas, only to rows of a table if the result is the same.

    Call in update context of a replica function. `apply` is the method of the optimizer's class;
    `variables` is None for all that the optimizer was built for.
    """
    if not any(map(is_indexed_slices, grads)):
        return apply(optimizer, list(grads), variables)
    if variables is None:
        variables = built_variables(optimizer)
    tables: dict[int, tuple[Any, IndexedSlices]] = {}
    given: list[Any] = []
    for grad, variable in zip(grads, variables, strict=True):
        if not is_indexed_slices(grad):
            given.append(grad)
        elif _may_take_rows(apply, optimizer, variable):
            slices = grad.combined()
            tables[id(variable)] = (variable, slices)
            given.append(slices.values)
        else:
            given.append(grad.to_dense())
    if not tables:
        return apply(optimizer, given, list(variables))
    with _as_rows(optimizer, tables):
        return apply(optimizer, given, list(variables))


def _may_take_rows(
    apply: _Apply, optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    is_ours = isinstance(variable, DistributedVariable) and variable.division is None
    if not is_ours or variable.constraint is not None or not is_worth_rows(variable.shape):
        return False
    known = _leaves_rows.setdefault(optimizer, {})  # By table: weight decay may exclude some.
    if id(variable) not in known:
        known[id(variable)] = _leaves_rows_alone(apply, optimizer, variable)
    return known[id(variable)]


def _leaves_rows_alone(
    apply: _Apply, optimizer: keras.optimizers.Optimizer, table: keras.Variable
) -> bool:
    """Tests whether an update leaves rows without a gradient and their slots unchanged."""
    if optimizer.use_ema or optimizer.gradient_accumulation_steps:
        return False
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return False
    own = [table, *_slots(optimizer, table)]
    if any(tuple(one.shape) != tuple(table.shape) for one in own):
        return False
    shape = (2, *table.shape[1:])
    others = {id(one) for one in optimizer.variables}

    def read(variable: keras.Variable) -> Any:
        # Created on demand, because all slots may not fit in memory.
        is_other = id(variable) in others
        return jnp.full(variable.shape, 3, variable.dtype) if is_other else None

    before: list[Any] = []
    for place, one in enumerate(own):
        numbers = np.linspace(0.1 + place, 1.7, int(np.prod(shape))).reshape(shape)
        before.append(numbers.astype(jnp.dtype(one.dtype)))

    def update(values: list[Any]) -> list[Any]:
        scope = ReplicaScope(read)
        for one, value in zip(own, values, strict=True):
            scope.set_value(one, value)
        scope.row_counts = dict.fromkeys(map(id, own), shape[0])
        with scope:
            apply(optimizer, [jnp.zeros(shape, table.dtype)], [table])
        return [scope.get_current_value(one) for one in own]

    try:
        # One program: op by op, each of some twenty operations would be compiled alone.
        after = jax.jit(update).lower(before).compile()(before)
    except Exception:  # noqa: BLE001 - any error: it needs the whole table
        return False
    return all(map(np.array_equal, before, jax.device_get(after)))


def _slots(optimizer: keras.optimizers.Optimizer, table: keras.Variable) -> list[Any]:
    return [one for one in optimizer.variables if getattr(one, "slot_of", None) is table]


@contextlib.contextmanager
def _as_rows(
    optimizer: keras.optimizers.Optimizer, tables: dict[int, tuple[Any, IndexedSlices]]
) -> Generator[None]:
    """Replaces the values of tables and their slots by some of their rows in a block."""
    outer = current_scope()
    assert outer is not None
    inner = ReplicaScope(outer.get_current_value)
    ids: dict[int, Any] = {}
    whole: dict[int, Any] = {}
    for table, slices in tables.values():
        for one in (table, *_slots(optimizer, table)):
            ids[id(one)] = slices.indices
            whole[id(one)] = one.own_value()
            # Rows past the end are not written back.
            rows = rows_to_update(whole[id(one)], slices.indices)
            inner.set_value(one, rows)
            inner.row_counts[id(one)] = rows.shape[0]
    with inner:
        yield
    captured, values = inner.captured()
    for place, (variable, _) in enumerate(captured.written):
        key = id(variable)
        if key in whole:
            values[place] = with_updated_rows(whole[key], ids[key], values[place])
    captured.replay(values, outer)


@patches(
    keras.optimizers.Optimizer,
    "apply",
    why="gradients are summed over replicas, then clipped and applied once",
)
@patches(keras.optimizers.LossScaleOptimizer, "apply", why="the same")
def applying_sums(original: Callable[..., Any]) -> Any:
    """Returns `apply` of an optimizer that sums gradients over replicas first."""

    def apply(
        self: keras.optimizers.Optimizer,
        grads: Iterable[Any],
        trainable_variables: Iterable[keras.Variable] | None = None,
    ) -> Any:
        grads = list(grads)
        context, scope = get_replica_context(), current_scope()
        variables = None if trainable_variables is None else list(trainable_variables)
        if context is None or scope is None:
            grads = _same_for_all_replicas(grads)
            if scope is not None and any(map(is_remote, variables or [])):
                raise _remote_in_merge_call(self)
            _build_in_scope(self, variables or [])
            return original(self, grads, variables)
        grads = _dense(grads)
        if is_analyzing():
            if not step_state().are_gradients_reduced:
                _weighed(grads, context, scope)
            return None
        note_optimizer(self)
        _check_owners(variables or [], context.strategy)
        if not self.built and variables is not None:
            build_in_replica(self, variables, context.strategy)
        targets = built_variables(self) if self.built and variables is None else variables
        placement = context.strategy.placement
        if placement.is_remote and self.built:
            own = grads if step_state().are_gradients_reduced else _weighed(grads, context, scope)
            return placement.remote.keras.send_gradients(
                self, own, targets or [], context, are_reduced=step_state().are_gradients_reduced
            )
        method = context.strategy.local_updates
        if method is not None and context.strategy.islands is not None:
            return _apply_locally(original, self, grads, targets or [], method, context, scope)
        summed = (
            grads
            if step_state().are_gradients_reduced
            else _summed(grads, context, scope, (self, targets or []))
        )
        if self.built and any(map(is_remote, targets or [])):
            return placement.remote.keras.apply_in_parts(
                original, self, summed, targets or [], context
            )
        with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
            if isinstance(self, keras.optimizers.LossScaleOptimizer):
                return _apply_with_loss_scale(self, [_whole(grad) for grad in summed], variables)
            return apply_with_rows(original, self, summed, variables)

    return apply


def _apply_locally(
    original: Callable[..., Any],
    optimizer: keras.optimizers.Optimizer,
    grads: list[Any],
    variables: list[Any],
    method: LocalUpdates,
    context: ReplicaContext,
    scope: ReplicaScope,
) -> Any:
    """Updates the weights of this replica's island, and synchronizes them if a period ends."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise _not_local("A LossScaleOptimizer was applied", context.strategy)
    own = [grad if (rows := scope.rows_of(grad)) is None else rows for grad in grads]
    if not step_state().are_gradients_reduced:
        own = island_gradients(own, context)
    elif context.island.num_replicas_in_sync > 1:
        raise _reduced_elsewhere(context.strategy)
    with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
        begin_round(optimizer, method)
        result = apply_with_rows(original, optimizer, own, variables)
        synchronize(optimizer, variables, method, context)
    return result


def _not_local(what: str, strategy: Strategy) -> NotImplementedError:
    return NotImplementedError(
        explain(
            f"{what} under {strategy}, whose replicas train apart.",
            expected="optimizer.apply(gradients, variables), which also synchronizes the replicas, "
            "of an optimizer without loss scaling.",
            fix='call optimizer.apply, and train in "mixed_bfloat16" instead of "mixed_float16".',
        )
    )


def _reduced_elsewhere(strategy: Strategy) -> NotImplementedError:
    return NotImplementedError(
        explain(
            f"skip_gradients_aggregation=True under {strategy}, whose replicas are in islands of "
            f"{strategy.islands.size if strategy.islands else 1}.",
            expected="each replica's own gradients, which the optimizer sums over the island; "
            "other sums would let its copies drift apart.",
            fix="leave skip_gradients_aggregation out.",
        )
    )


def _remote_in_merge_call(optimizer: keras.optimizers.Optimizer) -> NotImplementedError:
    return NotImplementedError(
        explain(
            f"{optimizer.name} was applied in merge_call to variables on parameter servers.",
            expected="a call in the replica function, or outside strategy.run.",
            fix="call optimizer.apply in the replica function; it sums the gradients.",
        )
    )


def _build_in_scope(optimizer: keras.optimizers.Optimizer, variables: list[Any]) -> None:
    """Creates the slots in the scope of the variables' strategy if no scope is active."""
    home = home_of(variables[0]) if variables else None
    if optimizer.built or home is None or has_strategy():
        return
    with home.strategy.scope(), keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)


@patches(
    keras.optimizers.Optimizer,
    "build",
    why="the optimizer belongs to the strategy of its variables, and adds the errors of compressed "
    "gradients and the weights of replicas that train apart",
)
def building_for_strategy(original: Callable[..., Any]) -> Any:
    """Returns `Optimizer.build` that joins a strategy first, and adds its own state last."""

    @functools.wraps(original)
    def build(self: keras.optimizers.Optimizer, variables: Iterable[keras.Variable]) -> Any:
        variables = list(variables)
        adopt_optimizer(self, variables)
        result = original(self, variables)
        add_state(self, variables)
        return result

    return build


def build_in_replica(
    optimizer: keras.optimizers.Optimizer, variables: list[Any], strategy: Strategy
) -> None:
    """Builds an optimizer for variables in replica context."""
    with keras.name_scope(optimizer.name, caller=optimizer):
        optimizer.build(variables)
    if strategy.placement.is_remote:
        strategy.placement.remote.keras.note_built(optimizer, strategy)


def apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    grads_and_vars: Iterable[tuple[Any, keras.Variable]],
    name: str | None = None,
    skip_gradients_aggregation: bool = False,
    experimental_aggregate_gradients: bool = True,
) -> Any:
    """Applies gradients with an optimizer, like `optimizer.apply_gradients` of TensorFlow 2.

    In replica context the gradients are first summed over replicas. In cross-replica context they
    are the same for all replicas and update every copy, as on a single device.

    Args:
        optimizer: a Keras optimizer.
        grads_and_vars: pairs of a gradient (array, `IndexedSlices` or None) and its variable.
        name: ignored; accepted for compatibility.
        skip_gradients_aggregation: True if the gradients are already reduced over replicas.
        experimental_aggregate_gradients: older name with the opposite meaning.

    Returns:
        The result of the optimizer.

    Raises:
        ValueError: gradients are not to be reduced but may differ between replicas.
        RuntimeError: `PerReplica` gradients in cross-replica context; reduce them first.

    Example:
        >>> v = sg.Variable(1.0)
        >>> sg.apply_gradients(keras.optimizers.SGD(0.5), [(jax.numpy.ones(()), v)])
        >>> float(v.value)
        0.5

    Source: TF 2.21 optimizer_v2.py, OptimizerV2.apply_gradients.
    """
    pairs = list(grads_and_vars)
    grads, variables = [grad for grad, _ in pairs], [variable for _, variable in pairs]
    if experimental_aggregate_gradients and not skip_gradients_aggregation:
        return optimizer.apply(grads, variables)
    with in_step(are_gradients_reduced=True):
        result = optimizer.apply(grads, variables)
    scope = current_scope()
    if scope is not None:
        for variable in variables:
            if id(variable) in scope.writes:
                scope.mark_unproven(variable)
    return result


@patches(keras.optimizers.Optimizer, "stateless_apply", why="the same as for `apply`")
@patches(keras.optimizers.LossScaleOptimizer, "stateless_apply", why="the same")
def stateless_with_sums(original: Callable[..., Any]) -> Any:
    """Returns `stateless_apply` of an optimizer that sums gradients over replicas first."""

    def stateless_apply(
        self: keras.optimizers.Optimizer,
        optimizer_variables: object,
        grads: Iterable[Any],
        trainable_variables: Sequence[keras.Variable],
    ) -> Any:
        context, scope = get_replica_context(), current_scope()
        if context is None or scope is None:
            return original(self, optimizer_variables, grads, trainable_variables)
        if is_analyzing():
            _weighed(_dense(grads), context, scope)
            return list(trainable_variables), optimizer_variables
        if context.strategy.islands is not None:
            raise _not_local("stateless_apply was called", context.strategy)
        note_optimizer(self)
        summed = sum_gradients(_dense(grads))
        with stack.push(stack.FrameKind.UPDATE, context.strategy, context):
            return original(self, optimizer_variables, summed, trainable_variables)

    return stateless_apply


def sum_gradients(grads: list[Any]) -> list[Any]:
    """Sums gradients over replicas as arrays; in MEAN mode averages them by true examples.

    Call in replica context. None stays None.
    """
    context, scope = get_replica_context(), current_scope()
    if context is None or scope is None:
        return [_whole(grad) for grad in grads]
    return [_whole(grad) for grad in _summed(grads, context, scope)]


def _summed(
    grads: list[Any],
    context: ReplicaContext,
    scope: ReplicaScope,
    trained: tuple[keras.optimizers.Optimizer, Sequence[Any]] | None = None,
) -> list[Any]:
    """Returns sums over replicas; for row gradients, the rows of all replicas.

    `trained` has the optimizer and the variables of the gradients, where they are known; only then
    may gradients be compressed.
    """
    # Even a single replica sends gradients of variables with other stores.
    is_sole = context.num_replicas_in_sync == 1
    if is_sole and not context.strategy.placement.uses_stores:
        return grads
    grads = _weighed(grads, context, scope)
    compressed = {} if trained is None else sums_of_compressed(*trained, grads, context)
    return _sums(grads, context, compressed)


def _sums(
    grads: Sequence[Any], context: ReplicaContext, compressed: Mapping[int, Any]
) -> list[Any]:
    """Returns sums over replicas; those at places in `compressed` are known."""
    present = [
        grad
        for place, grad in enumerate(grads)
        if place not in compressed and grad is not None and not is_indexed_slices(grad)
    ]
    summed = iter(context.communicator.all_reduce_many(ReduceOp.SUM, present))
    return [
        compressed[place]
        if place in compressed
        else context.communicator.all_reduce_slices(ReduceOp.SUM, grad)
        if isinstance(grad, IndexedSlices)
        else None
        if grad is None
        else next(summed)
        for place, grad in enumerate(grads)
    ]


def _weighed(grads: list[Any], context: ReplicaContext, scope: ReplicaScope) -> list[Any]:
    """Returns a replica's terms of the sum: rows where known, weighted in MEAN mode."""
    # Row gradients of value_and_grad stay rows unless they were modified.
    grads = [grad if (rows := scope.rows_of(grad)) is None else rows for grad in grads]
    has_part = context.num_replicas_in_sync > 1 or shares_batches()
    if has_part and current_mode() is StepMode.MEAN:
        grads = [
            scaled(grad, lambda part: part * example_fraction(context, part.dtype))
            for grad in terms_of(grads, context)
        ]
    return grads


def _dense(grads: Iterable[Any]) -> list[Any]:
    """Converts JAX's sparse arrays to dense ones, because collectives do not support them."""
    return [grad.todense() if isinstance(grad, JAXSparse) else grad for grad in grads]


def _whole(grad: object) -> Any:
    """Converts `IndexedSlices` to an array, because Keras's optimizers need arrays."""
    return grad.to_dense() if isinstance(grad, IndexedSlices) else grad


def _apply_with_loss_scale(
    optimizer: keras.optimizers.Optimizer, grads: list[Any], variables: list[Any] | None
) -> None:
    """Applies by the stateless form: Keras's stateful one assigns inside a traced conditional."""
    targets = built_variables(optimizer) if variables is None else variables
    new_values, new_state = optimizer.stateless_apply(
        [variable.value for variable in optimizer.variables],
        grads,
        [variable.value for variable in targets],
    )
    for variable, value in zip(
        [*targets, *optimizer.variables], [*new_values, *new_state], strict=True
    ):
        variable.assign(value)


def _check_owners(variables: list[Any], strategy: Strategy) -> None:
    for variable in variables:
        if (
            strategy.topology.devices is not None
            and not strategy.extended.variable_created_in_scope(variable)
        ):
            home = home_of(variable)
            raise invalid(
                f"{strategy} cannot train variable {variable.path!r}, which was created "
                f"{'under ' + str(home.strategy) if home else 'outside its scope'}.",
                expected="variables created in the scope of the strategy that trains them.",
                fix="build the model in `with strategy.scope():`.",
                code="SG201",
            )


def _same_for_all_replicas(grads: list[Any]) -> list[Any]:
    """Returns gradients that are equal on all replicas; raises for `PerReplica` ones."""
    parts = jax.tree.leaves(grads, is_leaf=lambda leaf: isinstance(leaf, PerReplica))
    if any(isinstance(part, PerReplica) for part in parts):
        raise RuntimeError(
            explain(
                "optimizer.apply received PerReplica gradients in cross-replica context of "
                f"{get_strategy()}.",
                expected="arrays or Mirrored values, which are the same for all replicas.",
                fix="call it in the function passed to strategy.run, or reduce the gradients "
                'first, for example with strategy.reduce("SUM", gradient, axis=None).',
                code="SG412",
            )
        )
    return [_whole(without_mirrored(grad)) for grad in grads]

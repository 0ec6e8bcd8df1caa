"""Row-wise optimizer updates of tables, used if rows without a gradient would not change.

A table with row lookups may be far too large to update whole in every step.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.execution.embeddings.lookups import is_worth_rows
from stratagem.execution.embeddings.sharded_row_updates import rows_to_update, with_updated_rows
from stratagem.execution.tracing.functionalize import ReplicaScope, current_scope
from stratagem.keras.private.optimizers import trainable_variables
from stratagem.keras.variables.variable import DistributedVariable
from stratagem.variables.indexed_slices import IndexedSlices, is_indexed_slices

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
        variables = trainable_variables(optimizer)
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
    for key, variable in inner.writes.items():
        value = inner.written_value(variable)
        if key in whole:
            value = with_updated_rows(whole[key], ids[key], value)
        outer.add_update((variable, value))
        if key in inner.unproven:
            outer.mark_unproven(variable)

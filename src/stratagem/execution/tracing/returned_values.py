"""Results of a step as values: variables are read, and dataclasses become pytrees."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.execution.context.batch import ReplicaBatch
from stratagem.execution.tracing.arguments import HostOnly
from stratagem.variables.distributed import DistributedValues
from stratagem.variables.regrouping import is_array
from stratagem.variables.sharded_variable import ShardedVariable


def as_values(result: object, late: Callable[[Any], bool] = lambda _: False) -> Any:
    """Returns a result with each variable replaced by its current value.

    Call it at the end of the step, while variables still return this replica's values. Variables
    that are `late` stay, because servers change them after the step. Containers that are leaves to
    JAX become pytrees: Keras's tracked ones and other subclasses of list, tuple and dict become
    plain; dataclasses become a `_Record`, which unflattens to the dataclass.
    """
    return jax.tree.map(functools.partial(_as_value, late), result, is_leaf=_is_distributed)


def rebuilt(values: object) -> Any:
    """Returns the result of `as_values` with its dataclasses restored."""
    return jax.tree.map(lambda leaf: leaf, values, is_leaf=_is_distributed)


def _is_distributed(leaf: object) -> bool:
    return isinstance(leaf, DistributedValues)


def _as_value(late: Callable[[Any], bool], leaf: object) -> Any:
    if isinstance(leaf, keras.Variable | ShardedVariable):
        return leaf if late(leaf) else leaf.value
    items = None if _is_distributed(leaf) else _items(leaf)
    if items is None:
        return leaf
    values = as_values(items, late)
    if not any(map(_is_value, jax.tree.leaves(values))):
        return leaf
    return _Record(type(leaf), values) if dataclasses.is_dataclass(leaf) else values


def _items(leaf: object) -> Any:
    """Returns the contents of a container that JAX treats as a leaf; None for other leaves."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    for kind in (list, tuple):
        if isinstance(leaf, kind):
            return kind(leaf)
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return None


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | keras.Variable)


@dataclasses.dataclass
class _Record:
    """A dataclass that is not registered with JAX, as a pytree of its fields."""

    kind: type
    fields: dict[str, Any]


def _dataclass(kind: type, fields: Any) -> Any:
    record: Any = object.__new__(kind)
    for name, value in fields[0].items():
        object.__setattr__(record, name, value)
    return record


jax.tree_util.register_pytree_node(
    _Record, lambda record: ((record.fields,), record.kind), _dataclass
)


class Results:
    """The leaves of a traced step's result; arrays become outputs of its program."""

    def __init__(self, batch: ReplicaBatch, *, is_stacked: bool) -> None:
        self._batch = batch
        self._is_stacked = is_stacked
        self.structure: Any = None
        self.leaves: list[tuple[bool, Any]] = []  # (True, output index) or (False, object)
        self.lengths: list[tuple[int, ...] | None] = []  # true rows of each padded leaf
        self.shapes: list[tuple[int, ...]] = []  # of the outputs
        self.late: list[tuple[int, Any]] = []  # outputs for variables known after the step

    def flatten(self, values: object) -> list[jax.Array]:
        """Returns the program outputs for a result of `as_values`."""
        leaves, self.structure = jax.tree.flatten(values, is_leaf=lambda leaf: leaf is None)
        outputs: list[jax.Array] = []
        for leaf in leaves:
            if isinstance(leaf, keras.Variable):
                self.late.append((len(outputs), leaf))
                leaf = jnp.zeros(leaf.shape, leaf.dtype)
            if isinstance(leaf, HostOnly):
                leaf.refuse()
            if not is_array(leaf):
                self.leaves.append((False, leaf))
                self.lengths.append(None)
                continue
            value = jnp.asarray(leaf)
            batch = self._batch
            is_padded = batch.is_padded and value.ndim > 0 and value.shape[0] == batch.size
            self.leaves.append((True, len(outputs)))
            self.lengths.append(batch.lengths if is_padded else None)
            self.shapes.append(value.shape)
            outputs.append(value[None] if self._is_stacked else value)
        return outputs

"""Rows of several tables in one array, so that one program updates them all.

A push has rows of each table, padded to one of a few sizes. A program for arrays of these sizes is
one of very many: 26 tables that each waver between two sizes have 2**26. Joined rows have one size
for each group of tables, and few of these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from stratagem.parameter_server.server.rows import aligned_empty
from stratagem.parameter_server.server.updates import State

# These update each element on its own, so joined rows have the same results, bit for bit.
# Others, such as Lamb, compute norms of an array.
_ELEMENTWISE = frozenset(
    {
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Adam,
        keras.optimizers.Adamax,
        keras.optimizers.AdamW,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
        keras.optimizers.Nadam,
        keras.optimizers.RMSprop,
        keras.optimizers.SGD,
    }
)
# The padding of joined rows: up to an eighth of the next power of two, and this many at least.
_PARTS, _LEAST_ROWS = 8, 64
# Joining copies rows. Larger arrays are updated apart: their copies would take longer than a call.
_MOST_BYTES = 2**20


def is_elementwise(optimizer: type) -> bool:
    """Returns True if an optimizer of Keras updates each element on its own. Not for subclasses."""
    return optimizer in _ELEMENTWISE


@dataclasses.dataclass(frozen=True)
class _Group:
    """Tables whose rows are joined under the name of the first one, and the rows of each."""

    names: Sequence[str]
    parts: Sequence[slice]

    @property
    def name(self) -> str:
        """The name of the joined rows."""
        return self.names[0]

    def joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the rows of all tables, padded with zeros."""
        first, count = np.asarray(arrays[0]), self.parts[-1].stop
        joined = aligned_empty((_padded(count), *first.shape[1:]), first.dtype)
        for part, array in zip(self.parts, arrays, strict=True):
            joined[part] = array
        joined[count:] = 0
        return joined

    def apart(self, joined: Any) -> dict[str, np.ndarray]:
        """Returns views of the rows of each table, by name."""
        array = np.asarray(joined)
        return {name: array[part] for name, part in zip(self.names, self.parts, strict=True)}


class _JoinedRows:
    """State and gradients with joined rows in the place of those of the groups."""

    def __init__(self, groups: Sequence[_Group], state: State, grads: Mapping[str, Any]) -> None:
        self._groups = groups
        values, slots, self.grads = dict(state.values), dict(state.slots), dict(grads)
        for group in groups:
            names = group.names
            joined = group.joined([values[name] for name in names])
            own_slots = {
                slot: group.joined([slots[name][slot] for name in names])
                for slot in slots[group.name]
            }
            gradient = group.joined([self.grads[name] for name in names])
            for name in names:
                del values[name], slots[name], self.grads[name]
            values[group.name], slots[group.name] = joined, own_slots
            self.grads[group.name] = gradient
        self.state = State(state.scalars, values, slots)

    def apart(self, state: State) -> State:
        """Returns the new state with the rows of each table."""
        values, slots = dict(state.values), dict(state.slots)
        for group in self._groups:
            own = {slot: group.apart(array) for slot, array in slots.pop(group.name).items()}
            values |= group.apart(values.pop(group.name))
            for name in group.names:
                slots[name] = {slot: rows[name] for slot, rows in own.items()}
        return State(state.scalars, values, slots)


def joined_rows(
    state: State, grads: Mapping[str, Any], kind_of: Callable[[str], Hashable]
) -> _JoinedRows | None:
    """Joins rows of tables whose rows are of one shape, dtype and kind; None if there are none."""
    tables: dict[Hashable, list[str]] = {}
    for name in state.rows:
        value = state.values[name]
        if math.prod(value.shape) * value.dtype.itemsize <= _MOST_BYTES:
            key = (value.shape[1:], value.dtype, *sorted(state.slots[name]), kind_of(name))
            tables.setdefault(key, []).append(name)
    groups = [_group(names, state) for names in tables.values() if len(names) > 1]
    return _JoinedRows(groups, state, grads) if groups else None


def _group(names: Sequence[str], state: State) -> _Group:
    parts: list[slice] = []
    begin = 0
    for name in names:
        end = begin + len(state.values[name])
        parts.append(slice(begin, end))
        begin = end
    return _Group(names, parts)


def _padded(count: int) -> int:
    step = max(_LEAST_ROWS, (1 << (count - 1).bit_length()) // _PARTS)
    return -(-count // step) * step

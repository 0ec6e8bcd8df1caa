"""Keys of a step: the distinct ones of all lookups in a table, and the place of each id in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stratagem.parameter_server.client.distinct_keys import representatives
from stratagem.parameter_server.client.distinct_rows import DistinctKeys
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.rows import aligned_empty, sum_rows


def as_keys(pairs: np.ndarray) -> np.ndarray:
    """Returns int64 keys of shape (...), from pairs of uint32 of shape (..., 2), low half first."""
    halves = np.ascontiguousarray(pairs, np.dtype("<u4"))
    return halves.view(np.dtype("<i8")).reshape(pairs.shape[:-1])


class StepKeys:
    """Distinct keys of one step's lookups in one table.

    Args:
        lookups: keys of each lookup, as pairs of uint32 of shape (..., 2).
        skips_zero: True if the key 0 is padding.
        layout: layout of the table, by whose shards the keys are ordered; None for no order.

    Attributes:
        keys: distinct keys, of shape (n,) and dtype int64.
        places: position in `keys` of each key of each lookup; -1 for padding.
        distinct: the keys to request and to push.
    """

    def __init__(
        self,
        lookups: Sequence[np.ndarray],
        *,
        skips_zero: bool = False,
        layout: ShardLayout | None = None,
    ) -> None:
        own = [as_keys(one) for one in lookups]
        flat = [one.reshape(-1) for one in own]
        keys = flat[0] if len(flat) == 1 else np.concatenate(flat)
        found = representatives(keys)
        numbers = np.arange(len(keys), dtype=np.int32)
        is_first = found == numbers
        if skips_zero:
            is_first &= keys != 0
        firsts = np.flatnonzero(is_first)
        self.keys = keys[firsts]
        self.distinct: DistinctKeys | np.ndarray = self.keys
        if layout is not None:
            self.distinct, order = DistinctKeys.ordered(layout, self.keys)
            self.keys, firsts = self.distinct.rows.ids, firsts[order]
        numbers[firsts] = np.arange(len(firsts), dtype=np.int32)
        places = numbers[found]
        if skips_zero:
            places[keys == 0] = -1
        self._skips_zero = skips_zero
        ends = np.cumsum([len(one) for one in flat])[:-1]
        self.places = [
            part.reshape(one.shape) for part, one in zip(np.split(places, ends), own, strict=True)
        ]

    def add(self, pairs: np.ndarray) -> np.ndarray:
        """Returns the places of more keys, and keeps the places of the others."""
        keys = as_keys(pairs)
        new = np.setdiff1d(keys, self.keys)
        self.keys = np.concatenate([self.keys, new[new != 0] if self._skips_zero else new])
        self.distinct = self.keys
        order = np.argsort(self.keys)
        places = np.searchsorted(self.keys, keys, sorter=order)
        places = np.append(order, -1)[np.minimum(places, len(order))].astype(np.int32)
        if self._skips_zero:
            places[keys == 0] = -1
        return places

    def rows(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Returns a row for each place, from rows of the distinct keys; zeros for padding."""
        shape = (*places.shape, *rows.shape[1:])
        if not len(rows):
            return np.zeros(shape, rows.dtype)
        out = aligned_empty(shape, rows.dtype)
        # "clip" writes directly to `out`.
        np.take(rows, places, axis=0, out=out, mode="clip")
        if self._skips_zero:
            out[places < 0] = 0
        return out

    def gradients(
        self, places: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray | DistinctKeys, np.ndarray]:
        """Returns distinct keys and the sums of their gradients, from gradients of places.

        Places that are no position in `keys` are left out: those of padding, and those that a sum
        over equal places has left unused.
        """
        is_key = (places >= 0) & (places < len(self.keys))
        if not is_key.all():
            places, rows = places[is_key], rows[is_key]
        sums = sum_rows(places, len(self.keys), rows)
        is_pushed = np.zeros(len(self.keys), np.bool_)
        is_pushed[places] = True
        if is_pushed.all():
            return self.distinct, sums
        return self.keys[is_pushed], sums[is_pushed]

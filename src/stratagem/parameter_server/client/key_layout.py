"""Layout of a table whose rows are found by 64-bit keys: buckets of keys on servers."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.tables.key_hash import BUCKET_COUNT as BUCKET_COUNT
from stratagem.parameter_server.server.tables.key_hash import buckets_of as buckets_of
from stratagem.parameter_server.server.tables.row_formats import RowFormat


@dataclasses.dataclass(frozen=True)
class KeyLayout(ShardLayout):
    """Servers and key buckets of a table that has rows for keys, made at their first update.

    As in a `ShardLayout`, `rows` has one entry per shard: its number of consecutive buckets. All
    shards together have `BUCKET_COUNT`. `shape` is (0, ...) with the shape of a row, because the
    number of rows is only known to the servers. `table` describes the table to these, as JSON; its
    `max_rows` is that of the whole table. With `skips_zero`, the key 0 is padding without a row.
    Shards of two generations have different names, because a server may have both during a move.
    """

    table: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any], hash=False)
    skips_zero: bool = False

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> KeyLayout:
        """Returns the layout from the fields of `dataclasses.asdict`, after a JSON round trip."""
        arguments = {**fields}
        for name in ("shape", "servers", "rows"):
            arguments[name] = tuple(arguments[name])
        return cls(**arguments)

    def name_of(self, shard: int) -> str:
        """Returns the server-side name of a shard."""
        if not self.generation:
            return super().name_of(shard)
        return f"{self.name}/part_{shard}@{self.generation}"

    @property
    def versioned_name(self) -> str:
        """Name under which a client records versions: those of earlier servers mean nothing."""
        return f"{self.name}@{self.generation}"

    @property
    def is_keyed(self) -> bool:
        """True: rows are found by key."""
        return True

    @property
    def row_format(self) -> RowFormat:
        """Format of the rows on servers, and in their answers."""
        return RowFormat.of(self.shape[1:], self.dtype, self.table)

    def shape_of(self, shard: int) -> tuple[int, ...]:
        """Returns the shape of a shard: no row, and the shape of a row."""
        return self.shape

    def shards_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the shard of each key."""
        return np.searchsorted(self.first_rows[1:], buckets_of(ids), side="right")

    def numbers_of(self, shard: int, ids: np.ndarray) -> np.ndarray:
        """Returns the keys of a shard as its server takes them."""
        return ids

    def spec_of(self, shard: int) -> dict[str, Any]:
        """Returns the fields of a shard's `ShardSpec`, with its first bucket as first row."""
        table = dict(self.table)
        if (most := table.get("max_rows")) is not None:
            share, left = divmod(most, len(self.rows))
            table["max_rows"] = share + (shard < left)
        return {**super().spec_of(shard), "table": table}

    def shard(self, shard: int) -> ShardLayout:
        """Raises a TypeError: a shard takes only keys of its buckets."""
        raise TypeError(
            explain(
                f"Shard {shard} of the table {self.name!r} was requested as a variable.",
                expected="the whole table: its rows are found by key, on any shard.",
                fix="look up keys in the table.",
            )
        )


def layout_of_keys(
    name: str,
    row_shape: Sequence[int],
    dtype: str,
    servers: Sequence[int],
    table: Mapping[str, Any] | None = None,
    *,
    skips_zero: bool = False,
    generation: int = 0,
) -> KeyLayout:
    """Returns the layout of a keyed table with about equal shares of buckets on each server."""
    ends = [BUCKET_COUNT * (place + 1) // len(servers) for place in range(len(servers))]
    rows = [stop - start for start, stop in itertools.pairwise([0, *ends])]
    shape, shares = (0, *row_shape), tuple(rows)
    return KeyLayout(
        name,
        shape,
        dtype,
        tuple(servers),
        shares,
        has_rows=True,
        table=dict(table or {}),
        skips_zero=skips_zero,
        generation=generation,
    )

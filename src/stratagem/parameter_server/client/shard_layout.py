"""Layout of a variable's shards on servers: a deterministic choice, the same in every client."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem.parameter_server.partitioners import Partitioner, rows_of_shards
from stratagem.parameter_server.server.shards import ShardSpec
from stratagem.parameter_server.server.tables.row_formats import (
    BUCKET_COUNT,
    RowFormat,
    buckets_of,
)

if TYPE_CHECKING:
    from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """Servers and rows of a variable's shards.

    `servers` and `rows` have one entry per shard: its server, and its number of consecutive rows (1
    for a scalar). `name` is unique in the cluster, `shape` that of the whole variable. `has_rows`
    is True if single rows are pulled and updated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    servers: tuple[int, ...]
    rows: tuple[int, ...]
    has_rows: bool = False

    @property
    def is_split(self) -> bool:
        """True if the variable has several shards."""
        return len(self.rows) > 1

    @property
    def first_rows(self) -> tuple[int, ...]:
        """First row of each shard."""
        return (0, *itertools.accumulate(self.rows[:-1]))

    def name_of(self, shard: int) -> str:
        """Returns the server-side name of a shard."""
        return f"{self.name}/part_{shard}" if self.is_split else self.name

    def shard(self, shard: int) -> ShardLayout:
        """Returns the layout of one shard as a separate variable."""
        server, rows = self.servers[shard], self.rows[shard]
        name, shape = self.name_of(shard), self.shape_of(shard)
        return ShardLayout(name, shape, self.dtype, (server,), (rows,), self.has_rows)

    @property
    def is_keyed(self) -> bool:
        """True if rows are found by 64-bit keys; see `KeyLayout`."""
        return isinstance(self, KeyLayout)

    def shards_of(self, ids: np.ndarray) -> np.ndarray:
        """Returns the shard of each id."""
        return np.searchsorted(self.first_rows[1:], ids, side="right")

    def numbers_of(self, shard: int, ids: np.ndarray) -> np.ndarray:
        """Returns the numbers within a shard of its ids."""
        numbers = ids - self.first_rows[shard]
        # Small row numbers take half of the message.
        return numbers.astype(np.min_scalar_type(-self.rows[shard]))

    def shape_of(self, shard: int) -> tuple[int, ...]:
        """Returns the shape of a shard."""
        return (self.rows[shard], *self.shape[1:]) if self.shape else ()

    def spec_of(self, shard: int) -> dict[str, Any]:
        """Returns the fields of a shard's `ShardSpec`."""
        spec = ShardSpec(
            self.name_of(shard),
            self.shape_of(shard),
            self.dtype,
            self.first_rows[shard],
            self.has_rows,
        )
        return dataclasses.asdict(spec)

    def parts(self, value: np.ndarray) -> list[np.ndarray]:
        """Splits a value of the whole variable by shard."""
        return np.split(value, self.first_rows[1:]) if self.is_split else [value]


class ShardPlacer:
    """Places each variable or shard on the server with the fewest bytes; ties go to the first one.

    `partitioner` chooses which variables to shard; None for none.
    """

    def __init__(self, num_servers: int, partitioner: Partitioner | None = None) -> None:
        self._held_bytes = [0] * num_servers
        self._partitioner = partitioner

    def splits(self, name: str, shape: Sequence[int], dtype: DTypeLike) -> bool:
        """Returns True if the partitioner splits a variable."""
        return len(rows_of_shards(self._partitioner, shape, np.dtype(dtype), name=name)) > 1

    def place(
        self, name: str, shape: Sequence[int], dtype: DTypeLike, *, has_rows: bool = False
    ) -> ShardLayout:
        """Places a variable.

        Raises:
            ValueError: the partitioner returned an invalid number of shards.

        Source: TF 2.21 parameter_server_strategy_v2.py, _create_variable.
        """
        kind = np.dtype(dtype)
        rows = rows_of_shards(self._partitioner, shape, kind, name=name)
        row_bytes = kind.itemsize * math.prod(shape[1:])
        servers: list[int] = []
        for count in rows:
            server = self._held_bytes.index(min(self._held_bytes))
            self._held_bytes[server] += max(1, count * row_bytes)
            servers.append(server)
        return ShardLayout(name, tuple(shape), kind.name, tuple(servers), tuple(rows), has_rows)


# Layout of a table whose rows are found by 64-bit keys: buckets of keys on servers.


@dataclasses.dataclass(frozen=True)
class KeyLayout(ShardLayout):
    """Servers and key buckets of a table that has rows for keys, made at their first update.

    As in a `ShardLayout`, `rows` has one entry per shard: its number of consecutive buckets. All
    shards together have `BUCKET_COUNT`. `shape` is (0, ...) with the shape of a row, because the
    number of rows is only known to the servers. `table` describes the table to these, as JSON; its
    `max_rows` is that of the whole table. With `skips_zero`, the key 0 is padding without a row.
    """

    table: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any], hash=False)
    skips_zero: bool = False

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


def layout_of_keys(
    name: str,
    row_shape: Sequence[int],
    dtype: str,
    servers: Sequence[int],
    table: Mapping[str, Any] | None = None,
    *,
    skips_zero: bool = False,
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
    )

"""Shards of new variables: whole values, and tables by row number or by key."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.server.shards import Shard, ShardSpec
from stratagem.parameter_server.server.tables.disk_rows import Position
from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard
from stratagem.parameter_server.server.tables.tiered_shard import TieredShard
from stratagem.parameter_server.server.tables.tiers import Tiers


def made_shard(
    spec: ShardSpec,
    make: Callable[[], np.ndarray] | None,
    tiers: Tiers,
    *,
    is_own: bool,
    position: Position | None = None,
) -> Shard:
    """Creates a shard with its initial value; one with rows on disk is added to `tiers`.

    `position` is the end of its journal, if any. `is_own` avoids a copy of the value.

    Raises ValueError for a value of another shape.
    """
    if spec.table is not None and spec.table.get("tiers") is not None:
        tiered = TieredShard(spec, position)
        tiers.add(tiered)
        return tiered
    if spec.table is not None:
        return KeyedShard(spec)
    assert make is not None
    value = np.array(make(), np.dtype(spec.dtype), copy=None if is_own else True)
    if value.shape != spec.shape:
        raise ValueError(
            explain(
                f"The initial value of {spec.name!r} has shape {value.shape}.",
                expected=f"shape {spec.shape}.",
                fix="make the initializer use its `shape` argument.",
            )
        )
    return Shard(spec, value)

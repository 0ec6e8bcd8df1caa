"""`sg.embedding.stats`: sizes and counters of keyed tables."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stratagem.errors import explain
from stratagem.variables.store import is_keyed

if TYPE_CHECKING:
    from stratagem.parameter_server.client.shard_layout import KeyLayout
    from stratagem.strategies.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class TableStats:
    """Size and counters of one keyed table, summed over its servers.

    Args:
        rows: number of rows.
        row_bytes: memory of a row: its values, optimizer slots, key, counters and index; 0.0 for a
            table without rows.
        created: rows that were created since the start.
        evicted: rows that were evicted.
        evicted_updates: row updates that the evicted rows had.
        refused_updates: gradients whose key had no row: not admitted, or the table was full.
        candidates: keys without a row that servers count for `AfterSightings`.

    Example:
        >>> sg.embedding.TableStats(2, 40.0, 3, 1, 5, 0, 0).rows
        2

    Source: specific to Stratagem.
    """

    rows: int
    row_bytes: float
    created: int
    evicted: int
    evicted_updates: int
    refused_updates: int
    candidates: int


def stats(strategy: Strategy) -> dict[str, TableStats]:
    """Returns sizes and counters of the keyed tables of a strategy. Never a key.

    Args:
        strategy: a strategy with parameter servers, in the process of its coordinator.

    Returns:
        `TableStats` by path of the table.

    Raises:
        ValueError: the strategy has no parameter servers.

    Example:
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     with strategy.scope():
        ...         sg.embedding.DynamicEmbedding(8, name="users").build()
        ...     sg.embedding.stats(strategy)["users/embeddings"].rows
        0

    Source: specific to Stratagem.
    """
    remote = strategy.placement.remote
    if remote is None:
        raise ValueError(
            explain(
                f"sg.embedding.stats received {strategy}, which has no parameter servers.",
                expected="a ParameterServerStrategy, or a HybridStrategy with a 'server' rule.",
                fix="pass the strategy that the tables were created under.",
            )
        )
    variables = remote.variables
    states = variables.client.describe()
    tables = [one for one in variables.named.values() if is_keyed(one)]
    return {one.path: _stats(variables.placement_of(one), states) for one in tables}


def _stats(layout: KeyLayout, states: Mapping[int, Mapping[str, Any]]) -> TableStats:
    numbers: Counter[str] = Counter()
    for shard, server in enumerate(layout.servers):
        numbers.update(states[server]["tables"][layout.name_of(shard)])
    rows, size_bytes = numbers["rows"], numbers["bytes"]
    fields = [one.name for one in dataclasses.fields(TableStats) if one.name != "row_bytes"]
    counts = {name: numbers[name] for name in fields}
    return TableStats(**counts, row_bytes=size_bytes / rows if rows else 0.0)

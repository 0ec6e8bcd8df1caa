"""`sg.embedding.reshard`: moves keyed tables to another number of servers while training runs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from stratagem.contexts import get_strategy
from stratagem.messages import explain
from stratagem.parameter_server.client.key_layout import KeyLayout, layout_of_keys
from stratagem.parameter_server.client.table_moves import ReshardStats, move_tables
from stratagem.parameter_server.embedding.saving import client_of

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


def reshard(
    num_servers: int, tables: Sequence[str] | None = None, *, strategy: Strategy | None = None
) -> ReshardStats:
    """Moves keyed tables to the first `num_servers` servers of the cluster, while training runs.

    Rows move with optimizer slots, counts, ages and keys that wait for admission. Each update is
    applied once. Call it between steps, in a Keras callback, or in a thread beside training: then
    updates continue while rows are copied, and pause for the last ones. A coordinator waits for
    functions that run, and if updates are synchronous for all that are scheduled.

    The cluster has all servers from its start. Tables begin on all of them: to keep some in
    reserve, move the tables to fewer servers while they are empty.

    Args:
        num_servers: number of servers to use, from 1 to that of the cluster.
        tables: paths of the tables, as in `sg.embedding.stats`; None for all.
        strategy: strategy of the tables; None for the current one.

    Returns:
        Size, duration and pause. Zeros if all tables are on these servers.

    Raises:
        ValueError: the strategy has no such tables or servers; `max_rows` below the number of
            servers; a table with `tiers`; or this is one of several independent workers.
        TypeError: `num_servers` is not an integer.
        sg.errors.UnavailableError: a server failed. The tables stay where they were.

    Example:
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=2) as strategy:
        ...     with strategy.scope():
        ...         sg.embedding.DynamicEmbedding(4, name="users").build()
        ...     moved = sg.embedding.reshard(1, strategy=strategy)
        >>> moved.rows
        0

    Source: `DistributedModelParallel.reshard` of TorchRec, which also moves tables between steps.
    """
    current: Any = strategy or get_strategy()
    client, variables = client_of(current), current.placement.remote.variables
    _require_coordinator(current, is_coordinator=variables.is_coordinator)
    _require_servers(num_servers, client.client.num_servers)
    with client.client.known.moving:
        known = client.layouts
        new = [_moved(known[name], num_servers) for name in _chosen(known, tables)]
        new = [one for one in new if one.servers != known[one.name].servers]
        if not new:
            return ReshardStats()
        has_journals, quiesced = variables.has_journals, _quiesced(current)
        return move_tables(client.client, new, quiesced=quiesced, has_journals=has_journals)


def _quiesced(strategy: Any) -> Callable[[], AbstractContextManager[object]]:
    """Returns a context in which no other process updates variables."""
    executor = strategy.executor
    return executor.quiesced if executor.schedules else contextlib.nullcontext


def _moved(layout: KeyLayout, num_servers: int) -> KeyLayout:
    most = layout.table.get("max_rows")
    if most is not None and most < num_servers:
        raise ValueError(
            explain(
                f"The keyed table {layout.name!r} divides max_rows={most} over {num_servers} "
                "servers.",
                expected="at least one row for each server.",
                fix="use fewer servers.",
            )
        )
    if layout.table.get("tiers") is not None:
        raise ValueError(
            explain(
                f"The keyed table {layout.name!r} has rows on disk and was to be moved.",
                expected="tables without the option tiers.",
                fix="name the other tables in tables=.",
            )
        )
    new = layout_of_keys(layout.name, layout.shape[1:], layout.dtype, range(num_servers))
    return dataclasses.replace(
        layout, servers=new.servers, rows=new.rows, generation=layout.generation + 1
    )


def _chosen(known: dict[str, KeyLayout], tables: Sequence[str] | None) -> list[str]:
    names = list(known) if tables is None else [*tables]
    if isinstance(tables, str) or {*names} - known.keys():
        raise ValueError(
            explain(
                f"reshard received tables={tables!r}.",
                expected=f"a list of some of {sorted(known)}.",
                fix="use the paths of sg.embedding.stats(strategy).",
            )
        )
    return list(dict.fromkeys(names))


def _require_servers(num_servers: object, most: int) -> None:
    if not isinstance(num_servers, int) or isinstance(num_servers, bool):
        raise TypeError(
            explain(
                f"reshard received num_servers={num_servers!r}.",
                expected="a number of servers.",
                fix="pass an int.",
            )
        )
    if not 1 <= num_servers <= most:
        raise ValueError(
            explain(
                f"reshard received num_servers={num_servers}.",
                expected=f"1 to {most}, the servers of this cluster.",
                fix="start the cluster with the most servers that you will need, and move the "
                "tables to fewer of them at first.",
            )
        )


def _require_coordinator(strategy: Strategy, *, is_coordinator: bool) -> None:
    if not is_coordinator:
        raise ValueError(
            explain(
                f"reshard was called under {strategy}, one of several programs that update the "
                "same tables.",
                expected="the coordinator, or the only program that uses the servers.",
                fix="save the tables, restart with other servers, and restore them; or train with "
                "a coordinator.",
            )
        )

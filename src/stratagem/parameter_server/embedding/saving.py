"""Saved versions of keyed tables: full ones, and the changes since an earlier one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from stratagem.contexts import get_strategy
from stratagem.errors import explain
from stratagem.parameter_server.client.shard_layout import KeyLayout, layout_of_keys
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.client.table_moves import ReshardStats, move_tables
from stratagem.parameter_server.server.tables.table_chains import compact as compact_version
from stratagem.parameter_server.server.tables.table_versions import TableVersions

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


def save(
    folder: str | os.PathLike[str], since: int | None = None, *, strategy: Strategy | None = None
) -> int:
    """Saves the rows of all keyed tables as a new version. Servers write while training continues.

    Each server saves its rows, optimizer slots, counts and ages as they are between two updates.
    A version is complete or does not exist. `sg.train.Checkpoint` saves all rows with the rest of a
    model; use this function for changes in between.

    Args:
        folder: folder of the versions, which this process and all servers share. One process at a
            time saves to it.
        since: saves only rows that changed or were evicted since this version, which must be kept.
            A server that was restarted saves all of its rows.
        strategy: strategy of the tables; None for the current one.

    Returns:
        The number of the version, counting from 1.

    Raises:
        ValueError: the strategy has no keyed tables.
        sg.errors.DataLossError: the version `since` is missing or damaged.
        OSError: a file cannot be written.

    Example:
        >>> import tempfile
        >>> from stratagem.parameter_server.client.shard_layout import layout_of_keys
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     client = strategy.placement.remote.variables.client
        ...     _ = client.create(layout_of_keys("users", (4,), "float32", [0]), None)
        ...     with tempfile.TemporaryDirectory() as folder, strategy.scope():
        ...         first = sg.embedding.save(folder)
        ...         second = sg.embedding.save(folder, since=first)
        ...         _ = sg.embedding.restore(folder)
        >>> first, second
        (1, 2)

    Source: specific to Stratagem.
    """
    return client_of(strategy).save(TableVersions(folder), since)


def restore(
    folder: str | os.PathLike[str],
    version: int | None = None,
    *,
    strategy: Strategy | None = None,
) -> int:
    """Replaces the rows of all keyed tables with those of a version.

    The number of servers may be another one. With the same number, training then continues bit for
    bit. All files are verified before anything changes. Weights, counters of optimizers and other
    variables are not part of a version: `sg.train.Checkpoint` has these.

    Args:
        folder: folder that `save` or `publish` wrote.
        version: number of the version; None for the published one, or else the newest.
        strategy: strategy of the tables; None for the current one.

    Returns:
        The number of the version.

    Raises:
        ValueError: the strategy has no keyed tables, or the version has others.
        sg.errors.NotFoundError: there is no such version.
        sg.errors.DataLossError: a file is missing, damaged, or not in order. The error names it.

    Example:
        >>> import tempfile
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     with strategy.scope():
        ...         users = sg.embedding.DynamicEmbedding(4, name="users")
        ...     _ = users(sg.embedding.keys([7]))
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         number = sg.embedding.save(folder, strategy=strategy)
        ...         restored = sg.embedding.restore(folder, strategy=strategy)
        >>> restored == number
        True

    Source: specific to Stratagem.
    """
    versions = TableVersions(folder)
    client = client_of(strategy)
    number = versions.chosen(version)
    client.restore(versions, number)
    return number


def compact(folder: str | os.PathLike[str], version: int | None = None) -> None:
    """Makes a version independent of earlier ones, which are then removed unless others need them.

    Needs no servers, and little memory: a byte for each row, and a piece of a table. It may run in
    another process while versions are added. If it is interrupted, the version is as before, or
    independent.

    Args:
        folder: folder that `save` or `publish` wrote.
        version: number of the version; None for the published one, or else the newest.

    Raises:
        sg.errors.NotFoundError: there is no such version.
        sg.errors.DataLossError: a file is missing, damaged, or not in order.
        OSError: a file cannot be written.

    Example:
        >>> sg.embedding.compact("/nowhere")
        Traceback (most recent call last):
        stratagem.errors.NotFoundError: /nowhere has no versions of tables...

    Source: specific to Stratagem.
    """
    versions = TableVersions(folder)
    compact_version(versions, versions.chosen(version))


def publish(folder: str | os.PathLike[str], *, strategy: Strategy | None = None) -> int:
    """Saves what changed since the published version, and publishes the result.

    The first version has all rows. Readers, `Tables`, have the new version after their next poll.

    Args:
        folder: as in `save`.
        strategy: strategy of the tables; None for the current one.

    Returns:
        The number of the version.

    Raises:
        ValueError: the strategy has no keyed tables.
        sg.errors.DataLossError: the published version is damaged.
        OSError: a file cannot be written.

    Example:
        >>> import tempfile
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     with strategy.scope():
        ...         users = sg.embedding.DynamicEmbedding(4, name="users")
        ...     _ = users(sg.embedding.keys([7]))
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         number = sg.embedding.publish(folder, strategy=strategy)
        >>> number
        1

    Source: specific to Stratagem.
    """
    versions = TableVersions(folder)
    number = client_of(strategy).save(versions, versions.latest)
    versions.publish(number)
    return number


def rollback(folder: str | os.PathLike[str], version: int) -> None:
    """Publishes an earlier version again. Needs no servers.

    To set the tables of the servers back, too, call `restore(folder, version)`.

    Args:
        folder: folder that `publish` wrote.
        version: number of the version.

    Raises:
        sg.errors.NotFoundError: there is no such version.
        OSError: a file cannot be written.

    Example:
        >>> import tempfile
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     with strategy.scope():
        ...         users = sg.embedding.DynamicEmbedding(4, name="users")
        ...     _ = users(sg.embedding.keys([7]))
        ...     with tempfile.TemporaryDirectory() as folder:
        ...         first = sg.embedding.publish(folder, strategy=strategy)
        ...         second = sg.embedding.publish(folder, strategy=strategy)
        ...         sg.embedding.rollback(folder, first)
        ...         with sg.embedding.Tables(folder) as tables:
        ...             version = tables.version
        >>> version == first
        True

    Source: specific to Stratagem.
    """
    versions = TableVersions(folder)
    versions.publish(versions.chosen(version))


def client_of(strategy: Strategy | None) -> TableClient:
    """Returns the client of a strategy's keyed tables; raises ValueError if it has none."""
    remote = (strategy or get_strategy()).placement.remote
    client = None if remote is None else TableClient(remote.variables.client)
    if client is None or not client.layouts:
        raise ValueError(
            explain(
                f"{strategy} has no keyed tables.",
                expected="a strategy with parameter servers, whose model has tables of keys.",
                fix="call this in strategy.scope(), or pass strategy=, after the model was built.",
            )
        )
    return client


# `sg.embedding.reshard`: moves keyed tables to another number of servers while training runs.


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

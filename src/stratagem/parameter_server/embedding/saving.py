"""Saved versions of keyed tables: full ones, and the changes since an earlier one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from stratagem.contexts import get_strategy
from stratagem.errors import explain
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.server.tables.table_chains import compact as compact_version
from stratagem.parameter_server.server.tables.table_versions import TableVersions

if TYPE_CHECKING:
    from stratagem.strategies.strategy import Strategy


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

"""Saved versions of keyed tables: full ones, and the changes since an earlier one."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from stratagem.contexts import get_strategy
from stratagem.environment import load
from stratagem.errors import check_choice, explain, invalid
from stratagem.parameter_server.client.shard_layout import KeyLayout
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.server.tables.saved_tables import TableVersions
from stratagem.parameter_server.server.tables.table_chains import compact as compact_version
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
        raise invalid(
            f"{strategy} has no keyed tables.",
            expected="a strategy with parameter servers, whose model has tables of keys.",
            fix="call this in strategy.scope(), or pass strategy=, after the model was built.",
        )
    return client


# Export of keyed tables to Parquet and Arrow files, which other programs read.


def export(
    folder: str | os.PathLike[str],
    *,
    format: str = "parquet",
    with_keys: bool = False,
    strategy: Strategy | None = None,
) -> list[str]:
    """Writes the rows of all keyed tables to files for other programs, one for each table.

    The column `row` has lists of numbers, as float32 for bfloat16 tables. The rows are as they are
    between two updates; while training continues, rows may be of different moments. The folder is
    complete or does not exist. Needs `pip install 'stratagem[data]'`.

    Args:
        folder: new folder, on this machine.
        format: "parquet", or "arrow" for Arrow IPC files.
        with_keys: adds the column `key`. Keys may be ids of persons, so the tables must have been
            created with `allow_row_export=True`.
        strategy: strategy of the tables; None for the current one.

    Returns:
        The paths of the files.

    Raises:
        ValueError: another format, or the strategy has no keyed tables.
        PermissionError: keys of a table that does not allow it.
        FileExistsError: the folder exists.
        ImportError: pyarrow is not installed.

    Example:
        >>> sg.embedding.export("/tmp/tables", format="csv")
        Traceback (most recent call last):
        ValueError: sg.embedding.export received format='csv'...

    Source: specific to Stratagem.
    """
    check_choice("sg.embedding.export", ("parquet", "arrow"), format=format)
    client = client_of(strategy)
    arrow = load("pyarrow", needed_by="sg.embedding.export", install="'stratagem[data]'")
    if with_keys:
        _check_keys(client)
    with _new_folder(Path(os.fspath(folder)).absolute()) as (new, final):
        names = {name: f"{quote(name, safe='')}.{format}" for name in client.layouts}
        for name, layout in client.layouts.items():
            schema = _schema(arrow, layout, with_keys=with_keys)
            with _writer(new / names[name], schema, format) as writer:
                for keys, rows in client.pieces(name, with_keys=with_keys):
                    writer.write_batch(_record_batch(arrow, schema, keys, rows))
    return [str(final / file) for file in names.values()]


def _check_keys(client: TableClient) -> None:
    closed = [name for name, one in client.layouts.items() if not one.table.get("allow_row_export")]
    if closed:
        raise PermissionError(
            explain(
                f"The keys of the tables {sorted(closed)} were to be exported.",
                expected="tables with allow_row_export=True: keys may be ids of persons.",
                fix="export without keys, or create the tables with allow_row_export=True.",
            )
        )


@contextlib.contextmanager
def _new_folder(folder: Path) -> Generator[tuple[Path, Path]]:
    """Yields a temporary folder, which then gets its name, and the latter."""
    if folder.exists():
        raise FileExistsError(
            explain(
                f"{folder} already exists.",
                expected="a new folder: an export never overwrites another one.",
                fix="export to another folder, or remove this one.",
            )
        )
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new, folder
        new.rename(folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def _schema(arrow: Any, layout: KeyLayout, *, with_keys: bool) -> Any:
    dtype = _exported(np.dtype(layout.dtype))
    size = math.prod(layout.shape[1:])
    fields = [("row", arrow.list_(arrow.from_numpy_dtype(dtype), size))]
    return arrow.schema([("key", arrow.int64()), *fields] if with_keys else fields)


def _exported(dtype: np.dtype) -> np.dtype:
    """Returns the dtype in files: Arrow has no bfloat16."""
    return dtype if dtype.kind in "biuf" else np.dtype(np.float32)


def _record_batch(arrow: Any, schema: Any, keys: np.ndarray | None, rows: np.ndarray) -> Any:
    flat = np.ascontiguousarray(rows).reshape(-1)
    numbers = arrow.array(flat.astype(_exported(flat.dtype), copy=False))
    column = arrow.FixedSizeListArray.from_arrays(numbers, schema.field("row").type.list_size)
    columns = [column] if keys is None else [arrow.array(keys), column]
    return arrow.record_batch(columns, schema=schema)


def _writer(path: Path, schema: Any, kind: str) -> Any:
    """Returns a context manager that writes record batches with its `write_batch`."""
    needed = {"needed_by": "sg.embedding.export", "install": "'stratagem[data]'"}
    if kind == "parquet":
        return load("pyarrow.parquet", **needed).ParquetWriter(path, schema)
    return load("pyarrow.ipc", **needed).new_file(str(path), schema)

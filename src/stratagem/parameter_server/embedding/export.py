"""Export of keyed tables to Parquet and Arrow files, which other programs read."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from stratagem.environment import load
from stratagem.errors import explain
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.embedding.saving import client_of

if TYPE_CHECKING:
    from stratagem.parameter_server.client.shard_layout import KeyLayout
    from stratagem.strategies.strategy import Strategy


_FORMATS = ("parquet", "arrow")


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
        ValueError: Tables cannot be exported as 'csv'...

    Source: specific to Stratagem.
    """
    _check_format(format)
    client = client_of(strategy)
    arrow = load("pyarrow", needed_by="sg.embedding.export", install="'stratagem[data]'")
    if with_keys:
        _check_keys(client)
    with _new_folder(Path(os.fspath(folder)).absolute()) as (new, final):
        names = {name: f"{quote(name, safe='')}.{format}" for name in client.layouts}
        for name, layout in client.layouts.items():
            schema = _schema(arrow, layout, with_keys=with_keys)
            with _writer(new / names[name], schema, format) as write:
                for keys, rows in client.pieces(name, with_keys=with_keys):
                    write(_record_batch(arrow, schema, keys, rows))
    return [str(final / file) for file in names.values()]


def _check_format(format: str) -> None:
    if format not in _FORMATS:
        raise ValueError(
            explain(
                f"Tables cannot be exported as {format!r}.",
                expected=f"one of {_FORMATS}.",
                fix='use format="parquet".',
            )
        )


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


@contextlib.contextmanager
def _writer(path: Path, schema: Any, kind: str) -> Generator[Callable[[Any], None]]:
    """Yields a function that writes a record batch."""
    if kind == "parquet":
        parquet = load(
            "pyarrow.parquet", needed_by="sg.embedding.export", install="'stratagem[data]'"
        )
        with parquet.ParquetWriter(path, schema) as writer:
            yield writer.write_batch
        return
    ipc = load("pyarrow.ipc", needed_by="sg.embedding.export", install="'stratagem[data]'")
    with ipc.new_file(str(path), schema) as writer:
        yield writer.write_batch

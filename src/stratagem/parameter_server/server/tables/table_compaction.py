"""Compaction of saved keyed tables: a file with all rows in place of one and its changes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from pathlib import Path
from typing import Any

from stratagem.parameter_server.server.tables.table_chains import TableChain
from stratagem.parameter_server.server.tables.table_files import TableFileWriter
from stratagem.parameter_server.server.tables.table_versions import TableVersions, file_name


def compact(versions: TableVersions, number: int) -> None:
    """Makes a version independent of others, and removes earlier ones that no version needs.

    Memory holds a piece of a table, and a byte for each slot. The version keeps its number and its
    identity, so that later versions continue it. An interrupted call leaves the version as it was,
    or with all rows.

    Raises:
        DataLossError: a file is missing, damaged or out of order.
        OSError: a file cannot be written.
    """
    manifest = versions.manifest(number)
    fields = copy.deepcopy(manifest)
    for name, table in fields["tables"].items():
        for part, own in enumerate(table["parts"]):
            if own["base"] is not None:
                table["parts"][part] |= _compacted(versions, number, name, part)
    fields["base"] = None
    versions.write_manifest(number, fields)
    for file in _files(manifest) - _files(fields):
        (versions.folder / file).unlink(missing_ok=True)
    _remove_unneeded(versions, number)


def _compacted(versions: TableVersions, number: int, name: str, part: int) -> dict[str, Any]:
    described = versions.chain(number, name, part)
    file = str(Path(file_name(number, name, part)).with_suffix(".all.rows"))
    with TableChain(versions.folder, described) as chain:
        head = dataclasses.replace(chain.files[0].head, base=None)
        with TableFileWriter(versions.folder / file, head) as writer:
            for _, rows in chain.rows():
                writer.add(rows)
            size_bytes = writer.end(chain.end)
    return {"file": file, "base": None, "size_bytes": size_bytes, "rows": writer.num_rows}


def _files(manifest: dict[str, Any]) -> set[str]:
    return {part["file"] for table in manifest["tables"].values() for part in table["parts"]}


def _remove_unneeded(versions: TableVersions, number: int) -> None:
    """Removes versions before the compacted and the published one that neither continues."""
    first = min(number, versions.latest or number)
    numbers = versions.numbers
    needed: set[int] = set()
    for one in numbers:
        base: int | None = one if one >= first else None
        while base is not None and base not in needed:
            needed.add(base)
            base = versions.manifest(base)["base"]
    for one in reversed(numbers):  # first those that continue others
        if one not in needed:
            with contextlib.suppress(OSError):
                versions.remove(one)

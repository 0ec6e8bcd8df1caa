"""`TableClient`: saves, restores and exports whole keyed tables, wherever their rows are."""

from __future__ import annotations

import dataclasses
import uuid
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import DataLossError, explain, invalid
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import KeyLayout
from stratagem.parameter_server.server.tables.saved_tables import (
    CHECKPOINT,
    TableVersions,
    base_of_next,
    file_name,
    remove_unneeded,
)


@dataclasses.dataclass(frozen=True)
class TableClient:
    """Requests about whole keyed tables, those that `client` knows. Servers read and write files.

    The folder must be the same for this process and all servers: on one machine, or on a shared
    file system. One process at a time saves to a folder.
    """

    client: ServerClient

    @property
    def layouts(self) -> dict[str, KeyLayout]:
        """Layouts of the tables, by name."""
        return {one.name: one for one in self.client.layouts if isinstance(one, KeyLayout)}

    def save(
        self,
        versions: TableVersions,
        since: int | None = None,
        names: Iterable[str] | None = None,
        **notes: str,
    ) -> int:
        """Saves tables, None for all, as a new version, and returns its number.

        With `since`, only rows that changed since that version. A server that does not remember
        them, as after a restart, saves all of its rows. `notes` are fields of the manifest.

        Raises:
            DataLossError: the version `since` is missing or damaged.
            OSError: a file cannot be written. Then no version is left.
        """
        base = None if since is None else versions.manifest(since)
        save, number = uuid.uuid4().hex, versions.begin()
        try:
            tables = {
                name: _described(self.layouts[name])
                for name in (self.layouts if names is None else names)
            }
            requests: dict[int, dict[str, Any]] = defaultdict(dict)
            for name, part, server, shard in self._shards(tables):
                requests[server][shard] = {
                    "file": file_name(number, name, part),
                    "table": name,
                    "part": part,
                    "base": base["save"] if base and _is_same(base, tables, name) else None,
                }
            fields = {"folder": str(versions.folder), "save": save}
            answers = self.client.ask_about_tables("save_tables", requests, **fields)
            _require_written(answers)
            for name, part, server, shard in self._shards(tables):
                answer = answers[server].fields["parts"][shard]
                tables[name]["parts"][part] |= {"file": file_name(number, name, part), **answer}
            versions.write_manifest(
                number, {"save": save, "base": since, "tables": tables, **notes}
            )
        except BaseException:
            versions.remove(number)
            raise
        return number

    def restore(self, versions: TableVersions, number: int) -> None:
        """Replaces all tables with saved ones. All files are verified before anything changes.

        The servers may be more or fewer than those that saved.

        Raises:
            DataLossError: a file is missing, damaged or out of order.
            ValueError: there is no such table in the version, or its rows have another shape.
        """
        names = {name: name for name in self.layouts}
        self.check_in(versions.folder, names, number)
        self.restore_from(versions.folder, names, number)

    def save_next(
        self,
        folder: Path,
        names: Iterable[str],
        checkpoint: str,
        last: str | None,
        full_every: int,
    ) -> int:
        """Saves tables for one of a series of checkpoints, and returns the number of the version.

        It has the changes since the checkpoint `last`, or all rows: see `base_of_next`.
        """
        versions = TableVersions(folder)
        since = base_of_next(versions, last, full_every)
        return self.save(versions, since, names, **{CHECKPOINT: checkpoint})

    def keep_for(self, folder: Path, checkpoints: Collection[str]) -> None:
        """Removes the versions of a series that none of these checkpoints needs."""
        remove_unneeded(
            TableVersions(folder), lambda _, manifest: manifest.get(CHECKPOINT) in checkpoints
        )

    def remove_from(self, folder: Path, number: int) -> None:
        """Removes the version of a checkpoint that was not written."""
        TableVersions(folder).remove(number)

    def check_in(self, folder: Path, names: Mapping[str, str], number: int) -> None:
        """Verifies the tables of a checkpoint; `names` maps own names to saved ones.

        Raises:
            DataLossError: a file is missing or damaged.
            ValueError: there is no such table, or its rows have another shape.
        """
        self._send_chains("check_tables", folder, names, number)

    def restore_from(self, folder: Path, names: Mapping[str, str], number: int) -> None:
        """Replaces tables with those of a checkpoint; see `check_in`."""
        try:
            self._send_chains("load_tables", folder, names, number)
            self.client.journal()  # a server that ends has no former rows then
        except Exception as error:
            error.add_note(
                "Some servers may have restored their rows, and others not: restore again."
            )
            raise

    def _send_chains(self, kind: str, folder: Path, names: Mapping[str, str], number: int) -> None:
        """Sends each server the files with rows of its buckets, by own names of tables."""
        versions = TableVersions(folder)
        manifest = versions.manifest(number)
        requests: dict[int, dict[str, Any]] = defaultdict(dict)
        for name, saved_name in names.items():
            layout = self.layouts[name]
            saved = _checked(manifest, layout, saved_name, versions)
            parts = range(len(saved["parts"]))
            chains = [versions.chain(number, saved_name, part) for part in parts]
            for part, server in enumerate(layout.servers):
                own = _buckets(layout, part)
                requests[server][layout.name_of(part)] = {
                    "buckets": own,
                    "chains": [one for one in chains if _overlap(one["buckets"], own)],
                    "save": manifest["save"],
                    "storage_dtype": saved["options"].get("storage_dtype"),
                }
        answers = self.client.ask_about_tables(kind, requests, folder=str(versions.folder))
        for answer in answers.values():
            if answer.fields.get("damage") is not None:
                raise DataLossError(answer.fields["damage"])

    def pieces(
        self, name: str, *, with_keys: bool
    ) -> Iterator[tuple[np.ndarray | None, np.ndarray]]:
        """Yields all rows of a table in pieces, with their keys or None.

        Each row is as it is between two updates; rows of different pieces may be of different
        moments.

        Raises:
            ServerError: keys were requested without `allow_row_export`.
        """
        layout = self.layouts[name]
        for part, server in enumerate(layout.servers):
            first: int | None = 0
            while first is not None:
                own = {"name": layout.name_of(part), "first": first, "with_keys": with_keys}
                answer = self.client.ask_about_tables("export_rows", {server: {}}, **own)[server]
                rows, *keys = answer.arrays
                yield (keys[0] if keys else None), rows
                first = answer.fields["first"]

    def _shards(self, names: Iterable[str]) -> Iterator[tuple[str, int, int, str]]:
        """Yields table, part, server, and name on the server of each shard."""
        for name in names:
            layout = self.layouts[name]
            for part, server in enumerate(layout.servers):
                yield name, part, server, layout.name_of(part)


def _described(layout: KeyLayout) -> dict[str, Any]:
    parts = [{"buckets": _buckets(layout, part)} for part in range(len(layout.servers))]
    return {
        "row_shape": list(layout.shape[1:]),
        "dtype": layout.dtype,
        "options": dict(layout.table),
        "parts": parts,
    }


def _require_written(answers: Mapping[int, Message]) -> None:
    failed = {
        server: answer.fields["text"]
        for server, answer in answers.items()
        if answer.kind == "failed"
    }
    if failed:
        raise OSError(
            explain(
                f"{len(failed)} of {len(answers)} parameter servers could not save their tables. "
                f"Server {min(failed)}: {failed[min(failed)]}",
                expected="a folder that this process and all servers share, with enough space.",
                fix="free space, or choose a folder that all machines have mounted at the same "
                "path. Earlier versions are unchanged.",
            )
        )


def _buckets(layout: KeyLayout, part: int) -> list[int]:
    return [layout.first_rows[part], layout.rows[part]]


def _overlap(one: list[int], other: list[int]) -> bool:
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def _is_same(base: Mapping[str, Any], tables: Mapping[str, Any], name: str) -> bool:
    """Returns True if a table has the same parts in an earlier version."""

    def parts(table: Mapping[str, Any]) -> tuple[Any, ...]:
        return (
            table["row_shape"],
            table["dtype"],
            table["options"].get("storage_dtype"),
            [one["buckets"] for one in table["parts"]],
        )

    return name in base["tables"] and parts(base["tables"][name]) == parts(tables[name])


def _checked(
    manifest: Mapping[str, Any], layout: KeyLayout, name: str, versions: TableVersions
) -> Mapping[str, Any]:
    saved = manifest["tables"].get(name)
    own = _described(layout)
    if saved is None:
        raise invalid(
            f"{versions.folder} has no table {name!r}.",
            expected=f"one of its tables: {sorted(manifest['tables'])}.",
            fix="give the layers the names that they had when the tables were saved.",
        )
    if (saved["row_shape"], saved["dtype"]) != (own["row_shape"], own["dtype"]):
        raise invalid(
            f"The table {layout.name!r} in {versions.folder} has rows of shape "
            f"{saved['row_shape']} and dtype {saved['dtype']}.",
            expected=f"shape {own['row_shape']} and dtype {own['dtype']}.",
            fix="create the layer with the output_dim that it had when it was saved.",
        )
    return saved

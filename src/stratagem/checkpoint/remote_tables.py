"""Tables whose rows stay on servers, as a part of checkpoints.

The servers write their rows first, to a folder beside the checkpoint. Orbax's metadata is written
after that, and names the folder. Then the folder moves into the checkpoint. So a checkpoint is
complete, with all rows, or does not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from stratagem.checkpoint.group_calls import run_on_first
from stratagem.checkpoint.objects import Part
from stratagem.checkpoint.saving import CheckpointLocation, load_manifest
from stratagem.storage import is_whole, wait_for_writing

__all__ = [
    "RemoteTables",
    "SavedTables",
    "check_tables",
    "location_of",
    "restore_tables",
    "save_tables",
]

_FOLDER = "tables"


class RemoteTables(Protocol):
    """Tables of a group of servers, by name. Equal for all tables of the group."""

    def save_to(self, folder: Path, names: Iterable[str]) -> None:
        """Writes all rows of tables to a new folder."""
        ...

    def check_in(self, folder: Path, names: Mapping[str, str]) -> None:
        """Verifies what `restore_from` reads; raises DataLossError, or ValueError for others."""
        ...

    def restore_from(self, folder: Path, names: Mapping[str, str]) -> None:
        """Replaces the rows of tables; `names` maps them to the names when they were saved."""
        ...


@dataclasses.dataclass(frozen=True)
class SavedTables:
    """Rows that were written for a checkpoint; `notes` belong in its manifest."""

    folder: Path
    notes: Mapping[str, Any]

    def remove(self) -> None:
        """Removes the rows of a checkpoint that was not written."""
        shutil.rmtree(self.folder, ignore_errors=True)


def save_tables(parts: Mapping[str, Part], folder: Path) -> SavedTables | None:
    """Writes the rows of all objects' tables beside a checkpoint; None if they have no tables.

    Call on every process; the first one writes.
    """
    groups: dict[RemoteTables, set[str]] = {}
    notes: dict[str, dict[str, tuple[int, str]]] = {}
    for part in parts.values():
        for path, (tables, name) in part.remote_tables.items():
            groups.setdefault(tables, set()).add(name)
            notes.setdefault(part.name, {})[path] = list(groups).index(tables), name
    if not groups:
        return None

    def write() -> str:
        _finish_others(folder)
        staged = folder.with_name(f".{folder.name}.tables-{uuid.uuid4().hex}")
        try:
            for number, (tables, some) in enumerate(groups.items()):
                tables.save_to(staged / str(number), sorted(some))
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
        return staged.name

    staged = run_on_first("Checkpoint.write", write)
    return SavedTables(folder.parent / staged, {"folder": staged, "names": notes})


def location_of(place: CheckpointLocation, saved: SavedTables | None) -> CheckpointLocation:
    """Returns a location that moves the tables into the checkpoint once it is written."""
    return place if saved is None else _LocationWithTables(place.folder, place, saved.folder)


def check_tables(folder: Path, manifest: Mapping[str, Any], part: Part, found: _Paths) -> None:
    """Verifies the saved tables of an object, before anything is restored; see `restore_tables`."""
    for (tables, number), names in _saved(manifest, part, found).items():
        tables.check_in(_tables_folder(folder, manifest) / str(number), names)


def restore_tables(folder: Path, manifest: Mapping[str, Any], part: Part, found: _Paths) -> None:
    """Restores the tables of an object on the servers; `found` maps own paths to saved ones."""
    for (tables, number), names in _saved(manifest, part, found).items():
        tables.restore_from(_tables_folder(folder, manifest) / str(number), names)


_Paths = Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class _LocationWithTables(CheckpointLocation):
    place: CheckpointLocation
    staged: Path

    def prepare(self) -> Path:
        return self.place.prepare()

    def finish(self, folder: Path) -> None:
        self.staged.rename(folder / _FOLDER)
        self.place.finish(folder)


def _saved(
    manifest: Mapping[str, Any], part: Part, found: _Paths
) -> dict[tuple[RemoteTables, int], dict[str, str]]:
    """Returns own and saved names of an object's tables, by group and number of its folder."""
    saved = manifest.get("tables", {}).get("names", {}).get(part.name, {})
    groups: dict[tuple[RemoteTables, int], dict[str, str]] = {}
    for path, (tables, name) in part.remote_tables.items():
        if path in found and found[path] in saved:
            number, saved_name = saved[found[path]]
            groups.setdefault((tables, number), {})[name] = saved_name
    return groups


def _tables_folder(folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Returns the folder of the tables, also if the process was killed before it moved them."""
    staged = folder.parent / manifest["tables"]["folder"]
    return staged if staged.is_dir() else folder / _FOLDER


def _finish_others(folder: Path) -> None:
    """Moves or removes the tables of earlier saves under this name that were killed."""
    stem, dash, _ = folder.name.rpartition("-")
    prefix = glob.escape(stem + dash or folder.name)
    if not any(folder.parent.glob(f".{prefix}*.tables-*")):
        return
    wait_for_writing()
    staged = [*folder.parent.glob(f".{prefix}*.tables-*")]
    owners: dict[str, Path] = {}
    for one in folder.parent.glob(f"{prefix}*"):
        if is_whole(one):
            with contextlib.suppress(Exception):  # others' checkpoints, or damaged ones
                owners[load_manifest(one).get("tables", {}).get("folder", "")] = one
    for one in staged:
        if one.name in owners:
            one.rename(owners[one.name] / _FOLDER)
        else:
            shutil.rmtree(one, ignore_errors=True)

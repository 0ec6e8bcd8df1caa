"""Tables whose rows stay on servers, as a part of checkpoints.

The servers write their rows first, to a folder beside the checkpoint. Orbax's metadata is written
after that, and names the folder. Then the folder moves into the checkpoint, unless it is that of a
series of checkpoints. So a checkpoint is complete, with all rows, or does not exist.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import shutil
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stratagem.checkpoint.latest import run_on_first
from stratagem.checkpoint.objects import Part
from stratagem.checkpoint.saving import CheckpointLocation, TableSeries, load_manifest
from stratagem.checkpoint.saving import RemoteTables as RemoteTables
from stratagem.checkpoint.storage.files import is_whole
from stratagem.checkpoint.storage.process import wait_for_writing

_FOLDER = "tables"


@dataclasses.dataclass(frozen=True)
class SavedTables:
    """Rows that were written for a checkpoint; `notes` belong in its manifest.

    `staged` is the folder that moves into the checkpoint, None for rows of a series. `remove`
    removes the rows of a checkpoint that was not written.
    """

    notes: Mapping[str, Any]
    staged: Path | None
    remove: Callable[[], None]


def save_tables(
    parts: Mapping[str, Part], folder: Path, series: TableSeries | None = None
) -> SavedTables | None:
    """Writes the rows of all objects' tables beside a checkpoint; None if they have no tables.

    With a series, most checkpoints have only the rows that changed. Call on every process; the
    first one writes.
    """
    groups: dict[RemoteTables, set[str]] = {}
    names: dict[str, dict[str, tuple[int, str]]] = {}
    for part in parts.values():
        for path, (tables, name) in part.remote_tables.items():
            groups.setdefault(tables, set()).add(name)
            names.setdefault(part.name, {})[path] = list(groups).index(tables), name
    if not groups:
        return None
    if series is not None:
        return _saved_in(series, groups, names, folder)

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

    staged = folder.with_name(run_on_first("Checkpoint.write", write))
    remove = partial(shutil.rmtree, staged, ignore_errors=True)
    return SavedTables({"folder": staged.name, "names": names}, staged, remove)


def _saved_in(
    series: TableSeries, groups: Mapping[RemoteTables, set[str]], names: object, folder: Path
) -> SavedTables:
    def write() -> list[int]:
        _finish_others(folder)
        return series.save(groups, folder.name)

    numbers = run_on_first("Checkpoint.write", write)
    notes = {"folder": series.folder.name, "names": names, "versions": numbers}
    before, series.last = series.last, folder.name

    def remove() -> None:
        series.last = before
        series.remove(numbers)

    return SavedTables(notes, None, remove)


def location_of(place: CheckpointLocation, saved: SavedTables | None) -> CheckpointLocation:
    """Returns a location that moves the tables into the checkpoint once it is written."""
    if saved is None or saved.staged is None:
        return place
    return _LocationWithTables(place.folder, place, saved.staged)


def check_tables(folder: Path, manifest: Mapping[str, Any], part: Part, found: _Paths) -> None:
    """Verifies the saved tables of an object, before anything is restored; see `restore_tables`."""
    for (tables, number), names in _saved(manifest, part, found).items():
        tables.check_in(*_place_of(folder, manifest, number, names))


def restore_tables(folder: Path, manifest: Mapping[str, Any], part: Part, found: _Paths) -> None:
    """Restores the tables of an object on the servers; `found` maps own paths to saved ones."""
    for (tables, number), names in _saved(manifest, part, found).items():
        tables.restore_from(*_place_of(folder, manifest, number, names))


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


def _place_of(
    folder: Path, manifest: Mapping[str, Any], number: int, names: Mapping[str, str]
) -> tuple[Path, Mapping[str, str], int]:
    """Returns the arguments of `check_in` and `restore_from` for a group.

    Rows of a single checkpoint are also found if the process was killed before it moved them.
    """
    notes = manifest["tables"]
    beside = folder.parent / notes["folder"]
    if "versions" in notes:
        return beside / str(number), names, notes["versions"][number]
    return (beside if beside.is_dir() else folder / _FOLDER) / str(number), names, 1


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

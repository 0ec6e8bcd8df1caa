"""Versions of saved keyed tables in a folder: their manifests, and the published one.

A version is a folder of files and a manifest, which is written last: without it the version does
not exist. `LATEST` has the number of the published version. Both are replaced atomically.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from stratagem.errors import DataLossError, NotFoundError, explain
from stratagem.group.transport.journal import sync, sync_folder, write_all
from stratagem.parameter_server.server.tables.table_files import damaged

_FORMAT = 1
_MANIFEST, _LATEST = "manifest.json", "LATEST"
_NUMBER = re.compile(r"\d{8}")


class TableVersions:
    """Versions in a folder, by number from 1 on. Other processes may add some."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(os.fspath(folder)).absolute()

    @property
    def numbers(self) -> list[int]:
        """Numbers of the complete versions, in order."""
        return [one for one in self._started() if (self.path(one) / _MANIFEST).is_file()]

    @property
    def latest(self) -> int | None:
        """Number of the published version; None if none was published."""
        try:
            return int((self.folder / _LATEST).read_text())
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise damaged(self.folder / _LATEST, "it is no number") from error

    def path(self, number: int) -> Path:
        """Returns the folder of a version."""
        return self.folder / f"{number:08d}"

    def chosen(self, version: int | None) -> int:
        """Returns a version: the given one, else the published one, else the newest.

        Raises:
            NotFoundError: there is no such version.
        """
        numbers = self.numbers
        number = self.latest if version is None else version
        if number is None and numbers:
            return numbers[-1]
        if number in numbers:
            return number
        which = "no versions of tables" if number is None else f"no version {number} of tables"
        raise NotFoundError(
            explain(
                f"{self.folder} has {which}.",
                expected=f"one of its versions: {numbers}." if numbers else "a folder with some.",
                fix="pass the folder that sg.embedding.save wrote, and a number that it returned.",
            )
        )

    def begin(self) -> int:
        """Makes the folder of a new version, removes unfinished ones, and returns its number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        started, complete = self._started(), {*self.numbers}
        for number in started:
            if number not in complete:
                self.remove(number)
        number = started[-1] + 1 if started else 1
        self.path(number).mkdir()
        return number

    def remove(self, number: int) -> None:
        """Removes a version: first its manifest."""
        (self.path(number) / _MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(self.path(number), ignore_errors=True)

    def manifest(self, number: int) -> dict[str, Any]:
        """Returns the manifest of a version.

        Raises:
            DataLossError: it is missing or damaged.
        """
        path = self.path(number) / _MANIFEST
        try:
            saved = json.loads(path.read_bytes())
            crc32 = saved.pop("crc32")
        except FileNotFoundError as error:
            raise damaged(path, "it is missing") from error
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise damaged(path, "it is no manifest") from error
        if crc32 != _checksum(saved):
            raise damaged(path, "its checksum is wrong")
        if (saved["format"], saved["version"]) != (_FORMAT, number):
            raise damaged(path, f"it is version {saved['version']} of format {saved['format']}")
        return saved

    def write_manifest(self, number: int, fields: Mapping[str, Any]) -> None:
        """Makes a version complete, or replaces its manifest."""
        saved = {**fields, "format": _FORMAT, "version": number}
        text = json.dumps({**saved, "crc32": _checksum(saved)}, indent=1)
        _write(self.path(number) / _MANIFEST, text)
        sync_folder(self.folder)

    def publish(self, number: int) -> None:
        """Makes a version the published one."""
        _write(self.folder / _LATEST, f"{number}\n")

    def chain(self, number: int, table: str, part: int) -> dict[str, Any]:
        """Returns the files of a part of a table, as `TableChain` takes them.

        Raises:
            DataLossError: a version that this one continues is missing, damaged or another one.
        """
        files: list[tuple[str, int, str]] = []
        manifest = self.manifest(number)
        own = manifest["tables"][table]["parts"][part]
        buckets = own["buckets"]
        while True:
            files.append((own["file"], own["size_bytes"], manifest["save"]))
            if own["base"] is None:
                return {"files": files, "buckets": buckets}
            number = manifest["base"]
            manifest = self.manifest(number)
            if manifest["save"] != own["base"]:
                how = "the next version does not continue this one"
                raise damaged(self.path(number) / _MANIFEST, how)
            own = manifest["tables"][table]["parts"][part]

    def _started(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = [one.name for one in self.folder.iterdir() if _NUMBER.fullmatch(one.name)]
        return sorted(map(int, names))


def file_name(number: int, table: str, part: int) -> str:
    """Returns the name of a file, relative to the folder of all versions."""
    return f"{number:08d}/{quote(table, safe='')}-{part}.rows"


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    with new.open("wb", buffering=0) as file:
        write_all(file, text.encode())
        sync(file)
    new.replace(path)
    sync_folder(path.parent)


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


# Versions that belong to a series of checkpoints: which one to continue, and which to remove.

# Field of a version's manifest: name of the checkpoint that it belongs to.
CHECKPOINT = "checkpoint"


def base_of_next(versions: TableVersions, last: str | None, full_every: int) -> int | None:
    """Returns the version that the next one continues; None if the next one is to have all rows.

    Args:
        versions: versions of the series.
        last: the last checkpoint of the series; None if there is none.
        full_every: at most so many versions in a row have all rows once. There are fewer if the
            changes have become larger than the rows: then all rows are the smaller save.
    """
    changed_bytes = 0
    try:
        base = number = _version_of(versions, last)
        for _ in range(full_every - 1):
            if number is None:
                return None
            manifest = versions.manifest(number)
            parts = _parts(manifest)
            if not all(_is_there(versions, part) for part in parts):
                return None
            if not _has_changes(manifest):
                return base if changed_bytes <= _size_bytes(parts) else None
            changed_bytes += _size_bytes(parts)
            number = manifest["base"]
    except DataLossError:
        return None
    return None


def remove_unneeded(versions: TableVersions, checkpoints: Collection[str]) -> None:
    """Removes the versions that no checkpoint needs.

    Versions after those of all checkpoints stay: their checkpoints may be about to be written. If a
    needed version is damaged, none is removed.
    """
    manifests: dict[int, dict[str, Any]] = {}
    for number in versions.numbers:
        try:
            manifests[number] = versions.manifest(number)
        except DataLossError:
            return
    kept = [one for one, manifest in manifests.items() if manifest.get(CHECKPOINT) in checkpoints]
    needed: set[int] = set()
    for one in kept:
        number: int | None = one
        while number in manifests and number not in needed:
            needed.add(number)
            number = manifests[number]["base"] if _has_changes(manifests[number]) else None
    for one in reversed(list(manifests)):  # first those that continue others
        if one not in needed and one < max(kept, default=0):
            versions.remove(one)


def _version_of(versions: TableVersions, checkpoint: str | None) -> int | None:
    """Returns the newest version of a checkpoint."""
    for number in reversed(versions.numbers if checkpoint else []):
        if versions.manifest(number).get(CHECKPOINT) == checkpoint:
            return number
    return None


def _parts(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for table in manifest["tables"].values() for part in table["parts"]]


def _has_changes(manifest: dict[str, Any]) -> bool:
    """Returns True if a version needs another one."""
    return any(part["base"] is not None for part in _parts(manifest))


def _size_bytes(parts: list[dict[str, Any]]) -> int:
    return sum(part["size_bytes"] for part in parts)


def _is_there(versions: TableVersions, part: dict[str, Any]) -> bool:
    path = versions.folder / part["file"]
    return path.is_file() and path.stat().st_size == part["size_bytes"]

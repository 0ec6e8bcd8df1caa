"""Versions that belong to a series of checkpoints: which one to continue, and which to remove."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from stratagem.errors import DataLossError
from stratagem.parameter_server.server.tables.table_versions import TableVersions

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

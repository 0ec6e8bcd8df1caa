"""Which process reads and writes, and when: here and now, or beside training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax

from stratagem import storage
from stratagem.background_errors import raise_reported, report_error
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.together import done_by_first, is_first
from stratagem.checkpoint.told_saves import tell_when_written, telling_of_save
from stratagem.storage import Arrays, Wanted, storage_process

__all__ = ["Place", "load_arrays", "load_manifest", "save", "wait_for_writing"]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a checkpoint goes.

    Args:
        folder: which.
    """

    folder: Path

    def prepare(self) -> Path:
        """Returns where to write; called on process 0 when it is about to be written."""
        return self.folder

    def finish(self, folder: Path) -> None:
        """Follows up what was written; called on process 0.

        Args:
            folder: what `prepare` returned.
        """


def save(
    items: Mapping[str, Arrays], notes: Mapping[str, Any], place: Place, options: CheckpointOptions
) -> Path:
    """Writes a checkpoint, or has it written. Call on every process; process 0 writes.

    Args:
        items: arrays by path, by item.
        notes: what else to keep, as JSON.
        place: where.
        options: how.

    Returns:
        The folder that process 0 has written, or will have.

    Raises:
        OSError: it could not be written, and training was to wait for it; nothing of it is left.
    """
    then = partial(_finish, place, options)
    if not options.is_async:
        with telling_of_save():
            work = partial(_write_now, items, notes, place, then)
            return Path(done_by_first("Checkpoint.write", work))
    if is_first():
        begun_s = time.monotonic()
        writing = storage_process().write(place.prepare, items, notes, then=then)
        writing.add_done_callback(_report)
        tell_when_written(writing, begun_s)
    # A worker may name a folder of its own, in which nothing is written.
    return Path(done_by_first("Checkpoint.write", lambda: str(place.folder)))


def wait_for_writing() -> None:
    """Waits for what is written behind training.

    Raises:
        OSError: it could not be written, and nobody has raised that yet.
    """
    storage.wait_for_writing()
    raise_reported()


def load_manifest(folder: Path) -> dict[str, Any]:
    """Returns what a checkpoint says of itself.

    Args:
        folder: of the checkpoint.

    Raises:
        DataLossError: it is damaged; and what else `stratagem.storage.read_manifest` raises.
    """
    storage.wait_for_writing()
    if jax.process_count() == 1:
        return storage.read_manifest(folder)
    return storage_process().read_manifest(folder)


def load_arrays(folder: Path, manifest: Mapping[str, Any], names: Wanted) -> dict[str, Arrays]:
    """Reads and checks arrays.

    Args:
        folder: of the checkpoint.
        manifest: what it says of itself.
        names: of the items; a dict names the arrays of each that are read.

    Returns:
        The arrays by path, by item.

    Raises:
        DataLossError: a file is missing or damaged.
    """
    if jax.process_count() == 1:
        return storage.read_arrays(folder, manifest, names)
    return storage_process().read_arrays(folder, manifest, names)


def _write_now(
    items: Mapping[str, Arrays], notes: Mapping[str, Any], place: Place, then: Any
) -> str:
    if jax.process_count() > 1:
        storage_process().write(place.prepare, items, notes, then=then).result()
        return str(place.folder)
    storage.wait_for_writing()
    folder = place.prepare()
    storage.write(folder, items, notes)
    then(folder)
    return str(place.folder)


def _finish(place: Place, options: CheckpointOptions, folder: Path) -> None:
    place.finish(folder)
    for callback in options.experimental_write_callbacks:
        callback(str(place.folder))


def _report(writing: Future[None]) -> None:
    error = writing.exception()
    if isinstance(error, Exception):
        report_error(error)

"""Reading and writing of checkpoints by process 0, synchronously or in a separate process."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax

from stratagem import storage
from stratagem.background_errors import raise_reported, report_error
from stratagem.checkpoint.checkpoint_events import record_async_save, record_save
from stratagem.checkpoint.group_calls import is_first, run_on_first
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.table_series import TableSeries
from stratagem.storage import (
    Arrays,
    ArraysToWrite,
    PendingArray,
    Receiver,
    Wanted,
    storage_process,
)

__all__ = [
    "CheckpointLocation",
    "check_arrays",
    "load_arrays",
    "load_manifest",
    "prepare",
    "save",
    "wait_for_writing",
]

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointLocation:
    """Folder to which a checkpoint is written.

    `tables` has the rows of a series of checkpoints; without it, a checkpoint has all of its rows.
    """

    folder: Path
    tables: TableSeries | None = dataclasses.field(default=None, kw_only=True)

    def prepare(self) -> Path:
        """Returns the folder to write to; called on process 0 before writing."""
        return self.folder

    def finish(self, folder: Path) -> None:
        """Post-processes the written folder, which `prepare` returned; called on process 0."""


def save(
    items: Mapping[str, ArraysToWrite],
    notes: Mapping[str, Any],
    place: CheckpointLocation,
    options: CheckpointOptions,
) -> Path:
    """Writes a checkpoint or schedules its write. Call on every process; process 0 writes.

    `items` holds arrays by item and path, some of an asynchronous write still on devices; `notes`
    further JSON content. Returns the final folder of process 0, which an asynchronous write creates
    later. If a synchronous write fails, OSError is raised and nothing of it is left. Without memory
    for a copy of the arrays, an asynchronous write of a single process becomes a synchronous one.
    """
    then = partial(_finish, place, options)
    if not (options.is_async and _has_room(items, place)):
        with record_save():
            work = partial(_write_now, items, notes, place, then)
            return Path(run_on_first("Checkpoint.write", work))
    if is_first():
        begun_s = time.monotonic()
        writing = storage_process().write(place.prepare, items, notes, then=then)
        writing.add_done_callback(_report)
        record_async_save(writing, begun_s)
    # A worker may pass its own folder, to which nothing is written.
    return Path(run_on_first("Checkpoint.write", lambda: str(place.folder)))


def prepare(size_bytes: int, work: Callable[[], None]) -> None:
    """Starts what asynchronous writes of so many bytes need, and `work` in the background.

    Call it on every process.
    """
    if is_first() and storage.has_room_for_copy(size_bytes):
        storage_process().reserve(size_bytes)
        storage_process().run(work)


def wait_for_writing() -> None:
    """Waits for asynchronous writes; raises their errors if no step has raised them yet."""
    storage.wait_for_writing()
    raise_reported()


def load_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint; raises DataLossError if it is damaged."""
    storage.wait_for_writing()
    if jax.process_count() == 1:
        return storage.read_manifest(folder)
    return storage_process().read_manifest(folder)


def load_arrays(
    folder: Path,
    manifest: Mapping[str, Any],
    names: Wanted,
    receive: Receiver | None = None,
) -> dict[str, Arrays]:
    """Reads and verifies arrays by item and path; raises DataLossError if a file is damaged.

    `names` holds item names; a dict also selects paths within each item. `receive` copies large
    arrays that this process reads itself, as in `stratagem.storage.read_arrays`.
    """
    if jax.process_count() == 1:
        return storage.read_arrays(folder, manifest, names, receive)
    return storage_process().read_arrays(folder, manifest, names)


def check_arrays(folder: Path, manifest: Mapping[str, Any], names: Wanted) -> None:
    """Verifies arrays without keeping them; raises DataLossError if a file is damaged."""
    if jax.process_count() == 1:
        storage.check_arrays(folder, manifest, names)
    else:
        storage_process().check_arrays(folder, manifest, names)


def _has_room(items: Mapping[str, ArraysToWrite], place: CheckpointLocation) -> bool:
    """True if the arrays can be copied; several processes always need the copy."""
    size_bytes = sum(array.nbytes for arrays in items.values() for array in arrays.values())
    if jax.process_count() > 1 or storage.has_room_for_copy(size_bytes):
        return True
    _logger.warning(
        "Training waits until %s is written: there is no memory for a copy of its %.3g GB.",
        place.folder,
        size_bytes / 1e9,
    )
    return False


def _write_now(
    items: Mapping[str, ArraysToWrite],
    notes: Mapping[str, Any],
    place: CheckpointLocation,
    then: Callable[[Path], None],
) -> str:
    if jax.process_count() > 1:
        storage_process().write(place.prepare, items, notes, then=then).result()
        return str(place.folder)
    storage.wait_for_writing()
    folder = place.prepare()
    storage.write(folder, _on_host(items), notes)
    then(folder)
    return str(place.folder)


def _on_host(items: Mapping[str, ArraysToWrite]) -> dict[str, Arrays]:
    return {
        name: {
            path: array.on_host() if isinstance(array, PendingArray) else array
            for path, array in arrays.items()
        }
        for name, arrays in items.items()
    }


def _finish(place: CheckpointLocation, options: CheckpointOptions, folder: Path) -> None:
    place.finish(folder)
    for callback in options.experimental_write_callbacks:
        callback(str(place.folder))


def _report(writing: Future[None]) -> None:
    error = writing.exception()
    if isinstance(error, Exception):
        report_error(error)

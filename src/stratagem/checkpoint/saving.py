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

from stratagem.background_errors import raise_reported, report_error
from stratagem.checkpoint import storage
from stratagem.checkpoint.checkpoint_events import record_async_save, record_save
from stratagem.checkpoint.group_calls import is_first, run_on_first
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.storage.files import Arrays, Wanted
from stratagem.checkpoint.storage.large_arrays import Receiver
from stratagem.checkpoint.storage.pending import PendingArray
from stratagem.checkpoint.storage.process import ArraysToWrite, storage_process
from stratagem.checkpoint.storage.shards import ShardedWrite
from stratagem.checkpoint.table_series import TableSeries
from stratagem.group.current import current_group

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


@dataclasses.dataclass(frozen=True)
class _Content:
    """A checkpoint that process 0 writes."""

    items: Mapping[str, ArraysToWrite]
    notes: Mapping[str, Any]
    place: CheckpointLocation
    then: Callable[[Path], None]
    sharded: ShardedWrite | None

    def write_now(self) -> str:
        """Writes it and returns the final folder."""
        if jax.process_count() > 1:
            self._submit().result()
            return str(self.place.folder)
        storage.wait_for_writing()
        folder = self.place.prepare()
        arrays = _on_host(self.items)
        if self.sharded is not None:
            shards = {item: arrays.pop(item) for item in list(arrays) if storage.is_of_shards(item)}
            storage.write_shards(self.sharded.folder, 0, shards)
        storage.write(folder, arrays, self.notes, self.sharded)
        self.then(folder)
        return str(self.place.folder)

    def write_later(self) -> str:
        """Schedules the write and returns the final folder."""
        begun_s = time.monotonic()
        writing = self._submit()
        writing.add_done_callback(_report)
        record_async_save(writing, begun_s)
        return str(self.place.folder)

    def _submit(self) -> Future[None]:
        group = current_group()
        return storage_process().write(
            self.place.prepare,
            self.items,
            self.notes,
            then=self.then,
            sharded=self.sharded,
            check=(lambda: None) if group is None else group.check,
        )


def save(
    items: Mapping[str, ArraysToWrite],
    notes: Mapping[str, Any],
    place: CheckpointLocation,
    options: CheckpointOptions,
    sharded: ShardedWrite | None = None,
) -> Path:
    """Writes a checkpoint or schedules its write. Call on every process.

    `items` holds arrays by item and path, some of an asynchronous write still on devices; `notes`
    further JSON content. Process 0 writes all but the other processes' shards. Returns the final
    folder of process 0, which an asynchronous write creates later. If a synchronous write fails,
    OSError is raised and nothing of it is left. Without memory for a copy of the arrays, an
    asynchronous write of a single process becomes a synchronous one.
    """
    content = _Content(items, notes, place, partial(_finish, place, options), sharded)
    is_async = options.is_async and _has_room(items, place)
    if not is_first() and sharded is not None:
        _write_shards(items, sharded, report=is_async)
    if not is_async:
        with record_save():
            return Path(run_on_first("Checkpoint.write", content.write_now))
    # A worker may pass its own folder, to which nothing is written.
    return Path(run_on_first("Checkpoint.write", content.write_later))


def prepare(size_bytes: int, work: Callable[[], None]) -> None:
    """Starts what asynchronous writes of so many bytes need, and `work` in the background.

    Call it on every process that writes.
    """
    if storage.has_room_for_copy(size_bytes):
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
    arrays that this process reads itself, as in `stratagem.checkpoint.storage.read_arrays`.
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


def _write_shards(
    items: Mapping[str, ArraysToWrite], sharded: ShardedWrite, *, report: bool
) -> None:
    """Begins to write this process's shards; process 0 waits for them, and gets any error."""
    group = current_group()
    assert group is not None
    try:
        writing = storage_process().write_shards(sharded.folder, group.process_id, items)
    except Exception as error:  # noqa: BLE001 - raised by process 0, and then on all
        storage.report_shard_error(sharded.folder, group.process_id, error)
        return
    if report:
        writing.add_done_callback(_report)


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

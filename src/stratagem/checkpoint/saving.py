"""Reading and writing of checkpoints, here or in a separate process, and of tables on servers."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from stratagem.checkpoint.latest import is_first, newest_in, read_in_time, run_on_first
from stratagem.checkpoint.objects import Part
from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.files import (
    Arrays,
    is_whole,
    write,
)
from stratagem.checkpoint.storage.process import (
    has_room_for_copy,
    storage_process,
)
from stratagem.checkpoint.storage.process import (
    wait_for_writing as wait_for_files,
)
from stratagem.checkpoint.storage.shards import (
    ShardedWrite,
    is_of_shards,
    report_shard_error,
    write_shards,
)
from stratagem.errors import NotFoundError, explain, raise_reported, report_error
from stratagem.group.current import current_group
from stratagem.observe.process_writer import current_events

# Options for writing and reading a checkpoint.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options for writing and reading a checkpoint.

    Args:
        enable_async: copies the values, then writes in a separate process while training continues.
            If writing fails, the next step, save or `sync` raises the error.
        experimental_enable_async_checkpoint: older name of `enable_async`.
        restore_components: with the same number of replicas, restores each replica's component of
            ON_READ variables, so that training continues bit for bit. Otherwise the components
            are derived from the aggregated value.
        experimental_write_callbacks: called with the path when the checkpoint is complete, on
            process 0; in another thread if the write is asynchronous.

    Example:
        >>> import os, tempfile
        >>> behind = sg.train.CheckpointOptions(enable_async=True)
        >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(folder + "/ckpt", options=behind)
        ...     checkpoint.sync()
        ...     os.path.isdir(path)
        True

    Source: TF 2.21 checkpoint_options.py, CheckpointOptions.
    """

    enable_async: bool = False
    experimental_enable_async_checkpoint: bool = False
    restore_components: bool = False
    experimental_write_callbacks: Sequence[Callable[[str], object]] = ()

    @property
    def is_async(self) -> bool:
        """True if training continues during the write."""
        return self.enable_async or self.experimental_enable_async_checkpoint


# Goodput events for saves and restores.

_STEP = "step_of_run"


def step_of_run() -> dict[str, int]:
    """Returns the step of a checkpoint, for its manifest; empty if no events are recorded."""
    events = current_events()
    return {} if events is None else {_STEP: events.last_step}


def record_restore(notes: Mapping[str, Any], source: str) -> None:
    """Records a restore event; `source` is "memory" or a path."""
    events, step = current_events(), notes.get(_STEP)
    if events is not None and step is not None:
        events.restored(step, source)


@contextlib.contextmanager
def record_memory_save() -> Generator[None]:
    """Records the duration of an in-memory backup; the devices are idle by then."""
    begun_s = time.monotonic()
    try:
        yield
    finally:
        events = current_events()
        if events is not None:
            events.kept(time.monotonic() - begun_s)


@contextlib.contextmanager
def record_save() -> Generator[None]:
    """Records a save that blocks training."""
    events = current_events()
    if events is None:
        yield
        return
    step, begun_s = events.last_step, time.monotonic()
    events.save_started(step)
    failed: str | None = None
    try:
        yield
    except Exception as error:
        failed = f"{type(error).__name__}: {error}"
        raise
    finally:
        duration_s = time.monotonic() - begun_s
        events.save_ended(step, stall_s=duration_s, duration_s=duration_s, failed=failed)


def record_async_save(writing: Future[None], begun_s: float) -> None:
    """Records the start of an asynchronous save, and its end when `writing` is done.

    Training stopped at the monotonic time `begun_s` and resumes now.
    """
    events = current_events()
    if events is None:
        return
    step, stall_s = events.last_step, time.monotonic() - begun_s
    events.save_started(step, is_asynchronous=True)

    def record_end(writing: Future[None]) -> None:
        error = writing.exception()
        events.save_ended(
            step,
            stall_s=stall_s,
            duration_s=time.monotonic() - begun_s,
            is_asynchronous=True,
            failed=None if error is None else f"{type(error).__name__}: {error}",
        )

    writing.add_done_callback(record_end)


# Tables on servers in a series of checkpoints: most of these have only the rows that changed.


class TableSeries:
    """Rows of the checkpoints of a manager, in a folder beside these.

    A checkpoint names the version of its rows. A version is complete before the checkpoint is, and
    is removed after it, so that a killed process leaves no checkpoint without its rows.

    Args:
        folder: folder of the versions.
        full_every: at most so many checkpoints in a row have all rows once.
    """

    def __init__(self, folder: Path, full_every: int) -> None:
        self.folder = folder
        self.last: str | None = None  # name of the checkpoint that the next one continues
        self._full_every = full_every
        self._groups: list[Any] = []

    def save(self, groups: Mapping[Any, Iterable[str]], checkpoint: str) -> list[int]:
        """Writes the tables of each group, and returns the numbers of the versions.

        Raises:
            OSError: a file cannot be written. Then none of the versions is left.
        """
        numbers: list[int] = []
        self._groups = list(groups)
        try:
            for place, (tables, names) in enumerate(groups.items()):
                numbers.append(
                    tables.save_next(
                        self._folder_of(place),
                        sorted(names),
                        checkpoint,
                        self.last,
                        self._full_every,
                    )
                )
        except BaseException:
            self.remove(numbers)
            raise
        return numbers

    def remove(self, numbers: Collection[int]) -> None:
        """Removes the versions of a checkpoint that was not written."""
        for place, number in enumerate(numbers):
            self._groups[place].remove_from(self._folder_of(place), number)

    def keep_for(self, checkpoints: Collection[str]) -> None:
        """Removes the versions that none of these checkpoints needs."""
        for place, tables in enumerate(self._groups):
            tables.keep_for(self._folder_of(place), checkpoints)

    def _folder_of(self, place: int) -> Path:
        return self.folder / str(place)


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
    items: Mapping[str, Arrays],
    notes: Mapping[str, Any],
    place: CheckpointLocation,
    options: CheckpointOptions,
    sharded: ShardedWrite | None = None,
    tables: Path | None = None,
) -> Path:
    """Writes a checkpoint or schedules its write. Call on every process.

    `items` holds arrays by item and path, `notes` further JSON content. Process 0 writes all but
    the other processes' shards, and moves the folder `tables` into the checkpoint. Returns the
    final folder of process 0, which an asynchronous write creates later. If a synchronous write
    fails, OSError is raised and nothing of it is left. Without memory for a copy of the arrays, an
    asynchronous write of a single process becomes a synchronous one.
    """
    then = partial(_finish, place, options, tables)

    def submit() -> Future[None]:
        group = current_group()
        check = (lambda: None) if group is None else group.check
        return storage_process().write(
            place.prepare, items, notes, then=then, sharded=sharded, check=check
        )

    def write_now() -> str:
        if jax.process_count() > 1:
            submit().result()
            return str(place.folder)
        wait_for_files()
        folder, arrays = place.prepare(), dict(items)
        if sharded is not None:
            shards = {item: arrays.pop(item) for item in list(arrays) if is_of_shards(item)}
            write_shards(sharded.folder, 0, shards)
        write(folder, arrays, notes, sharded)
        then(folder)
        return str(place.folder)

    def write_later() -> str:
        begun_s = time.monotonic()
        writing = submit()
        writing.add_done_callback(_report)
        record_async_save(writing, begun_s)
        return str(place.folder)

    is_async = options.is_async and _has_room(items, place)
    if not is_first() and sharded is not None:
        _write_shards(items, sharded, report=is_async)
    if not is_async:
        with record_save():
            return Path(run_on_first("Checkpoint.write", write_now))
    # A worker may pass its own folder, to which nothing is written.
    return Path(run_on_first("Checkpoint.write", write_later))


def prepare(size_bytes: int) -> None:
    """Starts what asynchronous writes of so many bytes need, in the background.

    Call it on every process that writes.
    """
    if has_room_for_copy(size_bytes):
        storage_process().reserve(size_bytes)


def wait_for_writing() -> None:
    """Waits for asynchronous writes; raises their errors if no step has raised them yet."""
    wait_for_files()
    raise_reported()


def load_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint; raises DataLossError if it is damaged."""
    wait_for_files()
    return read_in_time(folder, lambda: files.read_manifest(folder))


def _has_room(items: Mapping[str, Arrays], place: CheckpointLocation) -> bool:
    """True if the arrays can be copied; several processes always need the copy."""
    size_bytes = sum(array.nbytes for arrays in items.values() for array in arrays.values())
    if jax.process_count() > 1 or has_room_for_copy(size_bytes):
        return True
    _logger.warning(
        "Training waits until %s is written: there is no memory for a copy of its %.3g GB.",
        place.folder,
        size_bytes / 1e9,
    )
    return False


def _write_shards(items: Mapping[str, Arrays], sharded: ShardedWrite, *, report: bool) -> None:
    """Begins to write this process's shards; process 0 waits for them, and gets any error."""
    group = current_group()
    assert group is not None
    try:
        writing = storage_process().write_shards(sharded.folder, group.process_id, items)
    except Exception as error:  # noqa: BLE001 - raised by process 0, and then on all
        report_shard_error(sharded.folder, group.process_id, error)
        return
    if report:
        writing.add_done_callback(_report)


def _finish(
    place: CheckpointLocation, options: CheckpointOptions, tables: Path | None, folder: Path
) -> None:
    if tables is not None:
        tables.rename(folder / _FOLDER)
    place.finish(folder)
    for callback in options.experimental_write_callbacks:
        callback(str(place.folder))


def _report(writing: Future[None]) -> None:
    error = writing.exception()
    if isinstance(error, Exception):
        report_error(error)


# Readers for single arrays of a checkpoint, without the saved objects.


class CheckpointReader:
    """Reads single arrays of a checkpoint, named by object and path. Created by `load_checkpoint`.

    Args:
        path: path of the checkpoint.

    Raises:
        NotFoundError: the checkpoint does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = sg.train.Checkpoint(step=sg.Variable(7, dtype="int32"))
        ...     path = checkpoint.save(folder + "/ckpt")
        ...     reader = sg.train.load_checkpoint(folder)
        ...     print(reader.get_variable_to_shape_map(), reader.get_tensor("step/value"))
        {'step/value': [], 'save_counter/value': []} 7

    Source: TF 2.21 py_checkpoint_reader.py, CheckpointReader.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._folder = Path(os.fspath(path)).absolute()
        self._manifest = load_manifest(self._folder)
        self._entries = {
            f"{name}/{entry['path']}": (saved["item"], entry)
            for name, saved in self._manifest["objects"].items()
            for entry in self._manifest["items"][saved["item"]]
        }

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """Returns the shape of each array by name."""
        return {name: list(entry["shape"]) for name, (_, entry) in self._entries.items()}

    def get_variable_to_dtype_map(self) -> dict[str, str]:
        """Returns the dtype of each array by name."""
        return {name: str(entry["dtype"]) for name, (_, entry) in self._entries.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Returns True if the checkpoint has an array of this name.

        Args:
            tensor_str: name of the array.
        """
        return tensor_str in self._entries

    def get_tensor(self, tensor_str: str) -> np.ndarray[Any, Any]:
        """Reads one array; others are not read.

        Args:
            tensor_str: name of the array.

        Returns:
            The array, in host memory.

        Raises:
            DataLossError: the checkpoint is damaged.
            NotFoundError: no array has this name.
        """
        if tensor_str not in self._entries:
            raise NotFoundError(
                explain(
                    f"{self._folder} holds no array {tensor_str!r}.",
                    expected=f"one of {sorted(self._entries)}.",
                    fix="use a name that sg.train.list_variables(path) returns.",
                )
            )
        item, entry = self._entries[tensor_str]
        path = entry["path"]
        names = {item: [path]}
        read = read_in_time(
            self._folder, lambda: files.read_arrays(self._folder, self._manifest, names)
        )
        return read[item][path]


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike[str]) -> CheckpointReader:
    """Opens a checkpoint for reading single arrays. This process needs access to the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a folder, for its newest checkpoint.

    Returns:
        A reader with `has_tensor(name)`, `get_tensor(name)`, `get_variable_to_shape_map()` and
        `get_variable_to_dtype_map()`.

    Raises:
        NotFoundError: there is no checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     checkpoint = sg.train.Checkpoint(step=sg.Variable(7, dtype="int32"))
        ...     path = checkpoint.save(folder + "/ckpt")
        ...     reader = sg.train.load_checkpoint(folder)  # or load_checkpoint(path)
        ...     print(reader.has_tensor("step/value"), reader.get_tensor("step/value"))
        True 7

    Source: TF 2.21 checkpoint_utils.py, load_checkpoint.
    """
    path = Path(os.fspath(ckpt_dir_or_file))
    newest = None if is_whole(path) else newest_in(path)
    return CheckpointReader(path if newest is None else path / newest)


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> np.ndarray[Any, Any]:
    """Reads one array of a checkpoint. This process needs access to the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a folder, for its newest checkpoint.
        name: name of the array, such as "model/trainable_variables/dense/kernel".

    Returns:
        The array, in host memory.

    Raises:
        NotFoundError: there is no checkpoint, or no array of this name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(weights=sg.Variable([1.0, 2.0])).save(folder + "/ckpt")
        ...     print(sg.train.load_variable(folder, "weights/value"))
        [1. 2.]

    Source: TF 2.21 checkpoint_utils.py, load_variable.
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Lists the arrays of a checkpoint. This process needs access to the folder.

    Args:
        ckpt_dir_or_file: path of a checkpoint, or of a folder, for its newest checkpoint.

    Returns:
        Name and shape of each array, sorted by name.

    Raises:
        NotFoundError: there is no checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(weights=sg.Variable([1.0, 2.0])).save(folder + "/ckpt")
        ...     print(sg.train.list_variables(folder))
        [('save_counter/value', []), ('weights/value', [2])]

    Source: TF 2.21 checkpoint_utils.py, list_variables.
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


# Tables whose rows stay on servers, as a part of checkpoints.
#
# The servers write their rows first, to a folder beside the checkpoint. Orbax's metadata is
# written after that, and names the folder. Then the folder moves into the checkpoint, unless it
# is that of a series of checkpoints. So a checkpoint is complete, with all rows, or does not
# exist.


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
    groups: dict[Any, set[str]] = {}
    names: dict[str, dict[str, tuple[int, str]]] = {}
    for part in parts.values():
        for path, (tables, name) in part.remote_tables.items():
            groups.setdefault(tables, set()).add(name)
            names.setdefault(part.name, {})[path] = list(groups).index(tables), name
    if not groups:
        return None

    def write() -> tuple[str, list[int]]:
        _finish_others(folder)
        staged = folder.with_name(f".{folder.name}.tables-{uuid.uuid4().hex}")
        own = TableSeries(staged, 1) if series is None else series
        try:
            return own.folder.name, own.save(groups, folder.name)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise

    beside, numbers = run_on_first("Checkpoint.write", write)
    notes = {"folder": beside, "names": names, "versions": numbers}
    if series is None:
        staged = folder.with_name(beside)
        return SavedTables(notes, staged, partial(shutil.rmtree, staged, ignore_errors=True))
    before, series.last = series.last, folder.name

    def remove() -> None:
        series.last = before
        series.remove(numbers)

    return SavedTables(notes, None, remove)


def check_tables(folder: Path, manifest: Mapping[str, Any], part: Part, found: _Paths) -> None:
    """Verifies the saved tables of an object, before anything is restored; see `restore_tables`."""
    for (tables, number), names in _saved(manifest, part, found).items():
        tables.check_in(*_place_of(folder, manifest, number, names))


def restore_tables(folder: Path, manifest: Mapping[str, Any], part: Part, found: _Paths) -> None:
    """Restores the tables of an object on the servers; `found` maps own paths to saved ones."""
    for (tables, number), names in _saved(manifest, part, found).items():
        tables.restore_from(*_place_of(folder, manifest, number, names))


_Paths = Mapping[str, str]


def _saved(
    manifest: Mapping[str, Any], part: Part, found: _Paths
) -> dict[tuple[Any, int], dict[str, str]]:
    """Returns own and saved names of an object's tables, by group and number of its folder."""
    saved = manifest.get("tables", {}).get("names", {}).get(part.name, {})
    groups: dict[tuple[Any, int], dict[str, str]] = {}
    for path, (tables, name) in part.remote_tables.items():
        if path in found and found[path] in saved:
            number, saved_name = saved[found[path]]
            groups.setdefault((tables, number), {})[name] = saved_name
    return groups


def _place_of(
    folder: Path, manifest: Mapping[str, Any], number: int, names: Mapping[str, str]
) -> tuple[Path, Mapping[str, str], int]:
    """Returns the arguments of `check_in` and `restore_from` for a group.

    Rows are beside the checkpoint in a series, or if the process was killed before it moved them.
    """
    notes = manifest["tables"]
    beside = folder.parent / notes["folder"]
    tables = beside if beside.is_dir() else folder / _FOLDER
    return tables / str(number), names, notes["versions"][number]


def _finish_others(folder: Path) -> None:
    """Moves or removes the tables of earlier saves under this name that were killed."""
    stem, dash, _ = folder.name.rpartition("-")
    prefix = glob.escape(stem + dash or folder.name)
    if not any(folder.parent.glob(f".{prefix}*.tables-*")):
        return
    wait_for_files()
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

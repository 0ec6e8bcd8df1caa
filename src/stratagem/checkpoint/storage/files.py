"""Atomic reading and writing of checkpoint folders with Orbax.

A folder holds one Orbax item per object, a nested dict of arrays, so that plain Orbax can read it.
The first Keras model's item is named "pytree", as `keras.Model.load_weights` expects. The manifest
is Orbax's custom metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.checkpoint.storage.shard_reader import (
    Receiver,
    add_checksum,
    damage_error,
    describe_items,
    read_whole,
    verified_manifest,
    verify_whole,
)
from stratagem.checkpoint.storage.shards import (
    ShardedWrite,
    add_shards,
    entries_with_shards,
    items_with_placeholders,
    remove_shards,
    write_error,
)
from stratagem.environment import load
from stratagem.errors import NotFoundError, explain

# Collection of Orbax's log warnings, which often name the cause of an error that Orbax raises.

# Orbax logs to `absl`; asyncio logs task errors that were not retrieved.
_LOGGERS = ("absl", "asyncio")


@dataclasses.dataclass
class OrbaxWarnings(logging.Filter):
    """Collects the errors of warnings, each once and in order, instead of printing them."""

    causes: list[str] = dataclasses.field(default_factory=list[str])

    def filter(self, record: logging.LogRecord) -> bool:
        """Collects warnings; passes other records on."""
        if record.levelno < logging.WARNING:
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            text = f"{type(error).__name__}: {(str(error) or repr(error)).splitlines()[0]}"
            if text not in self.causes:
                self.causes.append(text)
        return False


@contextlib.contextmanager
def collect_warnings(collected: OrbaxWarnings) -> Generator[None]:
    """Collects the warnings that Orbax logs."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(collected)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(collected)


Arrays = Mapping[str, np.ndarray[Any, Any]]
Wanted = Sequence[str] | Mapping[str, Sequence[str]]

COMMIT_MARK = "commit_success.txt"
"""The file that Orbax writes last."""

_METADATA = "_CHECKPOINT_METADATA"
# Read and assigned at once where memory is scarce.
_PORTION_BYTES = 2**28
_STILL_WRITING_S = 5.0
_BETWEEN_REMOVALS_S = 0.1


def write(
    folder: Path,
    items: Mapping[str, Arrays],
    notes: Mapping[str, Any],
    sharded: ShardedWrite | None = None,
) -> None:
    """Writes arrays by item and path, with JSON notes, to a new folder.

    All processes have written the shards of `sharded`, which become part of the checkpoint. Raises
    FileExistsError if the folder exists, ImportError without Orbax, and OSError if the write
    failed; then nothing of it is left.
    """
    try:
        _write(folder, items, notes, sharded)
    finally:
        if sharded is not None:
            remove_shards(sharded)


def _write(
    folder: Path,
    items: Mapping[str, Arrays],
    notes: Mapping[str, Any],
    sharded: ShardedWrite | None,
) -> None:
    orbax = _orbax()
    if folder.exists():
        raise FileExistsError(
            explain(
                f"{folder} already exists.",
                expected="a new name: a checkpoint never overwrites another one.",
                fix="save under another name, or use a CheckpointManager, which replaces a "
                "checkpoint of the same number.",
            )
        )
    target = folder if sharded is None else sharded.folder / "checkpoint"
    described = describe_items(items)
    warned = OrbaxWarnings()
    try:
        if sharded is not None:
            described = entries_with_shards(described, sharded)
            items = items_with_placeholders(items, sharded)
        manifest = add_checksum({**notes, "items": described})
        trees = {name: _nested(item) for name, item in items.items() if _with_bytes(item)}
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Fail early: Orbax leaks tasks if it cannot create its first file.
        tempfile.TemporaryFile(dir=folder.parent).close()
        with collect_warnings(warned), _saving(orbax):
            orbax.save_checkpointables(target, trees, custom_metadata=manifest)
        if sharded is not None:
            add_shards(target, sharded)
            target.rename(folder)
    except Exception as error:
        _remove_unfinished(target)
        raise write_error(f"The checkpoint {folder}", _reason(error, warned)) from error


def warm_up() -> None:
    """Imports Orbax ahead of time, if installed; that takes seconds."""
    with contextlib.suppress(ImportError):
        _orbax()


def is_whole(folder: Path) -> bool:
    """True if a folder is a completely written checkpoint."""
    return all((folder / mark).is_file() for mark in (COMMIT_MARK, _METADATA))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint.

    Raises:
        NotFoundError: there is no complete checkpoint.
        DataLossError: it is damaged.
        ValueError: another program or a newer version wrote it.
    """
    _require(folder)
    try:
        metadata = json.loads((folder / _METADATA).read_bytes())
        manifest = metadata["custom_metadata"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        how = f"its metadata cannot be read ({type(error).__name__}: {error})"
        raise damage_error(str(folder), how) from error
    return verified_manifest(manifest, str(folder))


def read_arrays(
    folder: Path,
    manifest: Mapping[str, Any],
    names: Wanted,
    receive: Receiver | None = None,
) -> dict[str, Arrays]:
    """Reads and verifies arrays by item and path; raises DataLossError if a file is damaged.

    `names` holds item names; a dict also selects paths within each item. `receive` copies large
    arrays.
    """
    return dict[str, Arrays](read_whole(folder, _chosen(manifest, names), receive))


def check_arrays(folder: Path, manifest: Mapping[str, Any], names: Wanted) -> None:
    """Verifies arrays without keeping them; raises DataLossError if a file is damaged."""
    verify_whole(folder, _chosen(manifest, names))


def portions(
    entries: Mapping[str, Sequence[Mapping[str, Any]]],
) -> Iterator[dict[str, list[Mapping[str, Any]]]]:
    """Divides manifest entries by item into portions that are read at once."""
    portion: dict[str, list[Mapping[str, Any]]] = {}
    filled_bytes = 0
    for name, item in entries.items():
        for entry in item:
            size_bytes = math.prod(entry["shape"]) * np.dtype(entry["dtype"]).itemsize
            if portion and filled_bytes + size_bytes > _PORTION_BYTES:
                yield portion
                portion, filled_bytes = {}, 0
            portion.setdefault(name, []).append(entry)
            filled_bytes += size_bytes
    if portion:
        yield portion


def _saving(orbax: Any) -> Any:
    """Returns the context of a save: neither compressed nor copied by Orbax first.

    Compressing random float32 saves 8% of the disk and costs more than writing it; reading back
    costs three times the processor time.
    """
    context = orbax.Context()
    context.array.saving.use_compression = False
    if hasattr(context.memory, "deepcopy_host_arrays"):  # since 0.12.5
        # Nothing changes them: training waits, or they are in the memory of the storage process.
        context.memory.deepcopy_host_arrays = False
    return context


def _orbax() -> Any:
    return load(
        "orbax.checkpoint.experimental.v1",
        needed_by="A checkpoint",
        install="'stratagem[checkpoint]'",
    )


def _require(folder: Path) -> None:
    if is_whole(folder):
        return
    is_there = folder.is_dir()
    beside = sorted(one.name for one in folder.parent.glob("*") if is_whole(one))
    raise NotFoundError(
        explain(
            f"{folder} {'is not a complete checkpoint' if is_there else 'does not exist'}.",
            expected=f"a checkpoint. Checkpoints beside it: {', '.join(beside) or 'none'}.",
            fix="pass the path that Checkpoint.save returned, or CheckpointManager's "
            "latest_checkpoint. With several machines, use a shared folder.",
            code="SG701",
        )
    )


def _with_bytes(flat: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drops arrays without elements, which Orbax rejects; the manifest describes them fully."""
    return {path: array for path, array in flat.items() if array is ... or array.size}


def _chosen(manifest: Mapping[str, Any], names: Wanted) -> dict[str, list[dict[str, Any]]]:
    """Returns the entries of the wanted arrays by item."""
    items = {name: manifest["items"][name] for name in names}
    if not isinstance(names, Mapping):
        return items
    paths = {name: set(some) for name, some in names.items()}
    return {
        name: [entry for entry in entries if entry["path"] in paths[name]]
        for name, entries in items.items()
    }


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested dicts, the layout of Orbax and Keras."""
    tree: dict[str, Any] = {}
    for path, value in _with_bytes(flat).items():
        *folders, last = path.split("/")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[last] = value
    return tree


def _remove_unfinished(folder: Path) -> None:
    """Removes what a failed write left, until Orbax's threads, which may go on, leave no more."""
    end_s = time.monotonic() + _STILL_WRITING_S
    while left := list(folder.parent.glob(f"{folder.name}.orbax-checkpoint-tmp*")):
        for one in left:
            shutil.rmtree(one, ignore_errors=True)
        if time.monotonic() > end_s:
            return
        time.sleep(_BETWEEN_REMOVALS_S)


def _reason(error: BaseException, warned: OrbaxWarnings) -> str:
    """Returns the cause: Orbax often raises a general error after it logged the specific one."""
    first = (str(error) or repr(error)).splitlines()[0]
    causes = "".join(f"; {text}" for text in warned.causes if text not in first)
    return f"{type(error).__name__}: {first}{causes}"

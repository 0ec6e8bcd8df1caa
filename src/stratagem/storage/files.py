"""Checkpoints as folders that Orbax writes: a folder is there as a whole, or not at all.

A folder holds one Orbax item for each object, a nested dict of arrays, so that plain Orbax reads
it. The first Keras model's is called "pytree", which is where `keras.Model.load_weights` looks.
The manifest is Orbax's custom metadata.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import NotFoundError
from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.storage.manifest import check_array, checked, damaged, described, sealed
from stratagem.storage.warnings_of_orbax import Collected, collected_warnings

__all__ = [
    "Arrays",
    "COMMIT_MARK",
    "Wanted",
    "is_whole",
    "read_arrays",
    "read_manifest",
    "warm_up",
    "write",
]

Arrays = Mapping[str, np.ndarray[Any, Any]]
Wanted = Sequence[str] | Mapping[str, Sequence[str]]

COMMIT_MARK = "commit_success.txt"
"""What Orbax writes last."""

_METADATA = "_CHECKPOINT_METADATA"
_NOT_WHOLE = (OSError, ValueError, KeyError, TypeError, EOFError)


def write(folder: Path, items: Mapping[str, Arrays], notes: Mapping[str, Any]) -> None:
    """Writes a checkpoint.

    Args:
        folder: where; it must not be there yet.
        items: arrays by path, by item.
        notes: what else to keep, as JSON.

    Raises:
        FileExistsError: something is there already.
        ImportError: Orbax is not installed.
        OSError: it could not be written; nothing of it is left then.
    """
    orbax = _orbax()
    if folder.exists():
        raise FileExistsError(
            explain(
                f"{folder} is already there.",
                expected="a name that is not taken: a checkpoint is never written over another.",
                fix="save under another name; CheckpointManager replaces what has a number.",
            )
        )
    manifest = sealed({**notes, "items": {name: described(item) for name, item in items.items()}})
    trees = {name: _nested(item) for name, item in items.items() if _with_bytes(item)}
    warned = Collected()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Orbax leaves tasks behind where it cannot even begin.
        tempfile.TemporaryFile(dir=folder.parent).close()
        with collected_warnings(warned):
            orbax.save_checkpointables(folder, trees, custom_metadata=manifest)
    except Exception as error:
        _remove_unfinished(folder)
        raise OSError(
            explain(
                f"The checkpoint {folder} could not be written: {_reason(error, warned)}",
                expected="a folder that can be written, on a disk with enough space; earlier "
                "checkpoints are as they were.",
                fix="make room or choose another folder, and save again.",
            )
        ) from error


def warm_up() -> None:
    """Loads Orbax, if it is installed, before it is needed: that takes seconds."""
    with contextlib.suppress(ImportError):
        _orbax()


def is_whole(folder: Path) -> bool:
    """Tells whether a folder is a checkpoint that was written to its end.

    Args:
        folder: which.
    """
    return all((folder / mark).is_file() for mark in (COMMIT_MARK, _METADATA))


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns what a checkpoint says of itself.

    Args:
        folder: of the checkpoint.

    Raises:
        DataLossError: it is damaged.
        NotFoundError: there is none.
        ValueError: it was written by somebody else.
    """
    orbax = _orbax()
    _require(folder)
    warned = Collected()
    try:
        json.loads((folder / _METADATA).read_bytes())  # of what it cannot read Orbax says nothing
        with collected_warnings(warned):
            manifest = orbax.checkpointables_metadata(folder).custom_metadata
    except _NOT_WHOLE as error:
        raise damaged(str(folder), _reason(error, warned)) from error
    return checked(manifest, str(folder))


def read_arrays(folder: Path, manifest: Mapping[str, Any], names: Wanted) -> dict[str, Arrays]:
    """Reads and checks arrays.

    Args:
        folder: of the checkpoint.
        manifest: what it says of itself.
        names: of the items; a dict names the arrays of each that are read, the others stay on disk.

    Returns:
        The arrays by path, by item, as host arrays.

    Raises:
        DataLossError: a file is missing or damaged.
    """
    orbax = _orbax()
    entries = {name: _chosen(manifest["items"][name], names, name) for name in names}
    wanted = {name: _abstract(chosen) for name, chosen in entries.items()}
    asked = {
        name: _nested({**_left_on_disk(manifest["items"][name], orbax.PLACEHOLDER), **item})
        for name, item in wanted.items()
        if _with_bytes(item)
    }
    warned = Collected()
    try:
        with collected_warnings(warned):
            trees = orbax.load_checkpointables(folder, asked) if asked else {}
    except Exception as error:
        raise damaged(str(folder), _reason(error, warned)) from error
    items: dict[str, Arrays] = {}
    for name in names:
        flat = dict(wanted[name])
        flat |= {path: _leaf(trees[name], path) for path in _with_bytes(flat)}
        for entry in entries[name]:
            check_array(entry, flat[entry["path"]], str(folder))
        items[name] = flat
    return items


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
            f"{folder} is {'a folder, but no whole checkpoint' if is_there else 'not there'}.",
            expected=f"a checkpoint; beside it {', '.join(beside) or 'there is none'}.",
            fix="pass the path that Checkpoint.save returned, or CheckpointManager's "
            "latest_checkpoint; on several machines the folder has to be a shared one.",
        )
    )


def _with_bytes(flat: Mapping[str, Any]) -> Mapping[str, Any]:
    """Without arrays of no elements, which Orbax refuses: the manifest has all that they are."""
    return {path: array for path, array in flat.items() if array is ... or array.size}


def _chosen(entries: list[dict[str, Any]], names: Wanted, name: str) -> list[dict[str, Any]]:
    if not isinstance(names, Mapping):
        return entries
    paths = set(names[name])
    return [entry for entry in entries if entry["path"] in paths]


def _left_on_disk(entries: list[dict[str, Any]], mark: Any) -> dict[str, Any]:
    """Every array of an item that has bytes as one that is not read."""
    return {entry["path"]: mark for entry in entries if 0 not in entry["shape"]}


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A dict of dicts, as Orbax and Keras have it."""
    tree: dict[str, Any] = {}
    for path, value in _with_bytes(flat).items():
        *folders, last = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[last] = value
    return tree


def _leaf(tree: Any, path: str) -> np.ndarray[Any, Any]:
    for part in path.split("/"):
        tree = tree[part]
    return np.asarray(tree)


def _abstract(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {entry["path"]: np.empty(entry["shape"], np.dtype(entry["dtype"])) for entry in entries}


def _remove_unfinished(folder: Path) -> None:
    for left in folder.parent.glob(f"{folder.name}.orbax-checkpoint-tmp*"):
        shutil.rmtree(left, ignore_errors=True)


def _reason(error: BaseException, warned: Collected) -> str:
    """What went wrong: Orbax often raises something general, and warns of the cause before."""
    first = (str(error) or repr(error)).splitlines()[0]
    causes = "".join(f"; {text}" for text in warned.causes if text not in first)
    return f"{type(error).__name__}: {first}{causes}"

"""Shards of arrays, written by several processes into one checkpoint.

Each process writes its shards to an OCDBT database of its own, in a temporary folder. The process
that writes everything else moves these databases into Orbax's folder and adds their keys to its
own, so that an array is a Zarr array with one chunk for each shard. No bytes are copied.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.environment import load
from stratagem.errors import DeadlineExceededError, explain

INSTALL = "'stratagem[checkpoint]'"
_SUFFIX = "#shards"
_RESULT = "result.json"
# Values of so many bytes are handed to TensorStore at once, which copies them.
_BATCH_BYTES = 2**26
_POLL_S = 0.02
_GRACE_S = 10.0


@dataclasses.dataclass(frozen=True)
class ShardedArray:
    """An array that is written as equal shards, of a shape that divides the array's."""

    shape: tuple[int, ...]
    dtype: str
    shard_shape: tuple[int, ...]

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of shards along each axis."""
        return tuple(size // part for size, part in zip(self.shape, self.shard_shape, strict=True))


ShardedItems = Mapping[str, Mapping[str, ShardedArray | None]]
"""Items with sharded arrays: all paths of an item in order, with None for a whole array."""


@dataclasses.dataclass(frozen=True)
class ShardedWrite:
    """The sharded arrays of a checkpoint, whose shards processes write below `folder`.

    It is on the disk of the checkpoint.
    """

    folder: Path
    num_processes: int
    arrays: ShardedItems


def shards_item(item: str) -> str:
    """Returns the name under which the shards of an item are handed over, by `shard_key`."""
    return item + _SUFFIX


def is_of_shards(item: str) -> bool:
    """True for a name that `shards_item` returned."""
    return item.endswith(_SUFFIX)


def shard_key(path: str, position: tuple[int, ...]) -> str:
    """Returns the key of a shard in Orbax's database; `position` is its place in the grid."""
    return "/".join([path.replace("/", "."), "c", *map(str, position)])


def write_shards(
    folder: Path, process_id: int, items: Mapping[str, Mapping[str, np.ndarray[Any, Any]]]
) -> None:
    """Writes this process's shards, by `shards_item` and `shard_key`, and reports their checksums.

    An error is reported, too: `wait_for_shards` raises it. OSError is raised here, as well.
    """
    try:
        _part(folder, process_id).mkdir(parents=True, exist_ok=True)
        checksums = {
            item.removesuffix(_SUFFIX): _write_item(
                _part(folder, process_id) / item.removesuffix(_SUFFIX), shards
            )
            for item, shards in items.items()
        }
    except Exception as error:
        report_shard_error(folder, process_id, error)
        raise write_error(f"The shards of process {process_id} in {folder}", error) from error
    _report(folder, process_id, {"checksums": checksums})


def report_shard_error(folder: Path, process_id: int, error: Exception) -> None:
    """Reports that a process cannot write its shards; does nothing without the folder."""
    text = f"{type(error).__name__}: {error}"
    try:
        _report(folder, process_id, {"error": text})
    except OSError:  # the process that waits has a time limit
        return


def wait_for_shards(write: ShardedWrite, *, limit_s: float, check: Callable[[], None]) -> None:
    """Waits until all processes have written their shards; `check` may raise an error meanwhile.

    Raises OSError if a process failed, DeadlineExceededError after `limit_s`.
    """
    end_s, failed_s = time.monotonic() + limit_s, None
    for process_id in range(write.num_processes):
        while (result := _result(write.folder, process_id)) is None:
            try:
                check()
            except Exception:
                # A process that was killed during training still writes what it handed over.
                failed_s = time.monotonic() if failed_s is None else failed_s
                has_begun = _part(write.folder, process_id).is_dir()
                if not has_begun or time.monotonic() > failed_s + _GRACE_S:
                    raise
            if time.monotonic() > end_s:
                where = f"its shards to {write.folder.parent}"
                raise silence_error(f"Process {process_id} has not written {where}", limit_s)
            time.sleep(_POLL_S)
        if "error" in result:
            shards = f"The shards of process {process_id} in {write.folder.parent}"
            raise write_error(shards, result["error"])


def entries_with_shards(
    whole: Mapping[str, list[dict[str, Any]]], write: ShardedWrite
) -> dict[str, list[dict[str, Any]]]:
    """Returns manifest entries of all arrays, in order, with a checksum of each shard.

    `whole` has the entries of the other arrays.
    """
    others = {item: {entry["path"]: entry for entry in some} for item, some in whole.items()}
    checksums = _checksums(write)
    return {**whole} | {
        item: [
            others[item][path] if array is None else _entry(path, array, checksums[item])
            for path, array in arrays.items()
        ]
        for item, arrays in write.arrays.items()
    }


def items_with_placeholders(
    items: Mapping[str, Mapping[str, np.ndarray[Any, Any]]], write: ShardedWrite
) -> dict[str, Mapping[str, np.ndarray[Any, Any]]]:
    """Returns arrays in order, with those that Orbax writes instead of sharded ones."""
    return {**items} | {
        item: {
            path: items[item][path]
            if array is None
            else np.zeros((1,) * len(array.shape), np.dtype(array.dtype))
            for path, array in arrays.items()
        }
        for item, arrays in write.arrays.items()
    }


def add_shards(checkpoint: Path, write: ShardedWrite) -> None:
    """Moves the shards of all processes into a checkpoint that Orbax wrote with placeholders."""
    tensorstore = _tensorstore()
    context = tensorstore.Context()  # one, or keys cannot be copied
    for item, arrays in write.arrays.items():
        sharded = {path: array for path, array in arrays.items() if array is not None}
        if not sharded:
            continue
        root = checkpoint / item
        transaction = tensorstore.Transaction(atomic=True)
        database = open_database(root, context).with_transaction(transaction)
        for process_id in range(write.num_processes):
            source, target = (
                _part(write.folder, process_id) / item,
                root / f"shards.process_{process_id}",
            )
            if source.is_dir():
                source.rename(target)
                open_database(target, context).experimental_copy_range_to(database).result()
        for path, array in sharded.items():
            key = f"{path.replace('/', '.')}/zarr.json"
            metadata = json.loads(database.read(key).result().value)
            database.write(key, json.dumps(_with_shards(metadata, array)).encode()).result()
        transaction.commit_async().result()


def open_database(folder: Path, context: Any = None) -> Any:
    """Opens the OCDBT database in a folder."""
    base = {"driver": "file", "path": f"{folder}/"}
    return _tensorstore().KvStore.open({"driver": "ocdbt", "base": base}, context=context).result()


def _checksums(write: ShardedWrite) -> dict[str, dict[str, int]]:
    """Returns the checksums of all processes' shards by item and key."""
    checksums: dict[str, dict[str, int]] = {}
    for process_id in range(write.num_processes):
        for item, found in (_result(write.folder, process_id) or {})["checksums"].items():
            checksums.setdefault(item, {}).update(found)
    return checksums


def _entry(path: str, array: ShardedArray, checksums: Mapping[str, int]) -> dict[str, Any]:
    positions = np.ndindex(*array.grid)
    return {
        "path": path,
        "shape": list(array.shape),
        "dtype": array.dtype,
        "shard_shape": list(array.shard_shape),
        "crc32": [checksums[shard_key(path, position)] for position in positions],
    }


def _write_item(folder: Path, shards: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, int]:
    """Writes shards by key and returns their checksums."""
    folder.mkdir(parents=True, exist_ok=True)
    database = open_database(folder)
    checksums: dict[str, int] = {}
    pending: list[Any] = []
    size_bytes = 0
    for key, shard in shards.items():
        value = np.ascontiguousarray(shard).reshape(-1).view(np.uint8)
        checksums[key] = zlib.crc32(value.data)
        if pending and size_bytes + value.size > _BATCH_BYTES:
            _finish(pending)
            size_bytes = 0
        pending.append(database.write(key, value.tobytes()))
        size_bytes += value.size
    _finish(pending)
    return checksums


def _finish(pending: list[Any]) -> None:
    for write in pending:
        write.result()
    pending.clear()


def _with_shards(metadata: dict[str, Any], array: ShardedArray) -> dict[str, Any]:
    """Returns the metadata of a placeholder, changed to those of the array: a chunk is a shard."""
    (codec,) = metadata["codecs"]
    if codec["name"] == "sharding_indexed":
        metadata["codecs"] = codec["configuration"]["codecs"]
    metadata["shape"] = list(array.shape)
    metadata["chunk_grid"]["configuration"]["chunk_shape"] = list(array.shard_shape)
    return metadata


def _part(folder: Path, process_id: int) -> Path:
    return folder / f"process_{process_id}"


def _report(folder: Path, process_id: int, result: Mapping[str, Any]) -> None:
    part = _part(folder, process_id)
    part.mkdir(parents=True, exist_ok=True)
    new = part / f"{_RESULT}.new"
    new.write_text(json.dumps(result))
    os.replace(new, part / _RESULT)


def _result(folder: Path, process_id: int) -> dict[str, Any] | None:
    try:
        return json.loads((_part(folder, process_id) / _RESULT).read_text())
    except FileNotFoundError:
        return None


def write_error(what: str, reason: object) -> OSError:
    """Returns the error of a part of a checkpoint that could not be written."""
    return OSError(
        explain(
            f"{what} could not be written: {reason}",
            expected="a writable folder on a disk with enough space. Earlier checkpoints are "
            "unchanged.",
            fix="free space or choose another folder, then save again.",
        )
    )


def silence_error(what: str, limit_s: float) -> DeadlineExceededError:
    """Returns the error of a process that has not done its part of a save or restore in time."""
    return DeadlineExceededError(
        explain(
            f"{what} within {limit_s:g} s.",
            expected=f"an answer within {limit_s:g} s (STRATAGEM_SAVE_TIMEOUT_S).",
            fix="check whether the disk answers there, or raise the limit if a checkpoint may take "
            "that long. The next one starts anew; earlier checkpoints are unchanged.",
            code="SG508",
        )
    )


def remove_shards(write: ShardedWrite) -> None:
    """Removes the temporary folder."""
    shutil.rmtree(write.folder, ignore_errors=True)


def _tensorstore() -> Any:
    return load("tensorstore", needed_by="A checkpoint", install=INSTALL)

"""Checkpoint manifest: contents of a checkpoint, with a checksum of each array."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from stratagem.errors import DataLossError
from stratagem.messages import explain
from stratagem.processor_time import available_cores

FORMAT = 1
SHARDED_FORMAT = 2
"""The format with arrays that are saved as shards, with a checksum each."""


def describe_items(
    items: Mapping[str, Mapping[str, np.ndarray[Any, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """Returns path, shape, dtype and checksum of each array of each item, in order."""
    arrays = [array for item in items.values() for array in item.values()]
    with ThreadPoolExecutor(max(1, int(available_cores())), "stratagem-checksums") as threads:
        checksums = threads.map(_checksum, arrays)
        return {
            name: [
                {
                    "path": path,
                    "shape": list(array.shape),
                    "dtype": str(array.dtype),
                    "crc32": next(checksums),
                }
                for path, array in item.items()
            ]
            for name, item in items.items()
        }


def check_array(entry: Mapping[str, Any], array: np.ndarray[Any, Any], where: str) -> None:
    """Raises DataLossError if an array differs from its manifest entry."""
    is_same = (
        list(array.shape) == entry["shape"]
        and str(array.dtype) == entry["dtype"]
        and _checksum(array) == entry["crc32"]
    )
    if not is_same:
        raise damage_error(where, f"the array {entry['path']} differs from the saved one")


def is_sharded_entry(entry: Mapping[str, Any]) -> bool:
    """True for the entry of an array that is saved as shards."""
    return "shard_shape" in entry


def add_checksum(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest with its format version and a checksum of its text."""
    entries = (entry for item in manifest.get("items", {}).values() for entry in item)
    is_sharded = any(map(is_sharded_entry, entries))
    manifest = {**manifest, "format": SHARDED_FORMAT if is_sharded else FORMAT}
    return {**manifest, "crc32": _text_checksum(manifest)}


def verified_manifest(manifest: object, where: str) -> dict[str, Any]:
    """Returns the manifest without its checksum.

    Raises DataLossError if the checksum differs, and ValueError for a foreign or later format.
    """
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ValueError(
            explain(
                f"{where} was not written by sg.train.Checkpoint.",
                expected="a checkpoint with Stratagem's manifest.",
                fix="load Keras files with model.load_weights or keras.saving.load_model.",
            )
        )
    if manifest["format"] not in (FORMAT, SHARDED_FORMAT):
        raise ValueError(
            explain(
                f"{where} has format {manifest['format']}.",
                expected=f"format {FORMAT} or {SHARDED_FORMAT}, which this version of Stratagem "
                "reads.",
                fix="read it with the Stratagem version that wrote it, or a later one.",
            )
        )
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    if _text_checksum(rest) != manifest.get("crc32"):
        raise damage_error(where, "its manifest has a wrong checksum")
    return rest


def damage_error(where: str, how: str) -> DataLossError:
    """Returns the error for a damaged checkpoint."""
    return DataLossError(
        explain(
            f"The checkpoint {where} is damaged: {how}.",
            expected="unchanged files.",
            fix="restore an earlier checkpoint: CheckpointManager.checkpoints lists them, and "
            "restore_or_initialize(skip_damaged=True) restores the newest undamaged one.",
            code="SG702",
        )
    )


def _checksum(array: np.ndarray[Any, Any]) -> int:
    contiguous = np.ascontiguousarray(array)
    return zlib.crc32(contiguous.reshape(-1).view(np.uint8).data) if array.size else 0


def _text_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())

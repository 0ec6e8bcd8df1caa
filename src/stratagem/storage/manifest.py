"""What a checkpoint says of itself: what is in it, and the checksum of each array."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from stratagem.errors import DataLossError
from stratagem.messages import explain

__all__ = ["FORMAT", "check_array", "checked", "damaged", "described", "sealed"]

FORMAT = 1


def described(arrays: Mapping[str, np.ndarray[Any, Any]]) -> list[dict[str, Any]]:
    """Returns what is to be known of arrays, in their order.

    Args:
        arrays: by path.

    Returns:
        Path, shape, dtype and checksum of each.
    """
    return [
        {
            "path": path,
            "shape": list(array.shape),
            "dtype": str(array.dtype),
            "crc32": _checksum(array),
        }
        for path, array in arrays.items()
    ]


def check_array(entry: Mapping[str, Any], array: np.ndarray[Any, Any], where: str) -> None:
    """Raises for an array that is not the one that was saved.

    Args:
        entry: of `described`.
        array: what was read.
        where: the checkpoint, for the message.

    Raises:
        DataLossError: another shape, dtype or checksum.
    """
    is_same = (
        list(array.shape) == entry["shape"]
        and str(array.dtype) == entry["dtype"]
        and _checksum(array) == entry["crc32"]
    )
    if not is_same:
        raise damaged(where, f"the array {entry['path']} is not the one that was saved")


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a manifest with the checksum of its own text.

    Args:
        manifest: what JSON can hold.
    """
    return {**manifest, "format": FORMAT, "crc32": _text_checksum({**manifest, "format": FORMAT})}


def checked(manifest: Any, where: str) -> dict[str, Any]:
    """Returns a manifest that is whole.

    Args:
        manifest: what was read.
        where: the checkpoint, for the message.

    Returns:
        The manifest without its checksum.

    Raises:
        DataLossError: its checksum is another.
        ValueError: it is none of ours, or of a later version.
    """
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ValueError(
            explain(
                f"{where} was not written by sg.train.Checkpoint.",
                expected="a checkpoint that tells what is in it.",
                fix="load what Keras wrote with model.load_weights or keras.saving.load_model.",
            )
        )
    if manifest["format"] != FORMAT:
        raise ValueError(
            explain(
                f"{where} has format {manifest['format']}.",
                expected=f"format {FORMAT}, which this version of Stratagem reads.",
                fix="read it with the version that wrote it, or a later one.",
            )
        )
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    if _text_checksum(rest) != manifest.get("crc32"):
        raise damaged(where, "what it says of itself has another checksum")
    return rest


def damaged(where: str, how: str) -> DataLossError:
    """Returns the error for a checkpoint that is not whole.

    Args:
        where: the checkpoint.
        how: what is wrong with it.
    """
    return DataLossError(
        explain(
            f"The checkpoint {where} is damaged: {how}.",
            expected="files as they were written.",
            fix="restore an earlier one: CheckpointManager.checkpoints lists them, and "
            "restore_or_initialize(skip_damaged=True) takes the newest that is whole.",
        )
    )


def _checksum(array: np.ndarray[Any, Any]) -> int:
    contiguous = np.ascontiguousarray(array)
    return zlib.crc32(contiguous.reshape(-1).view(np.uint8).data) if array.size else 0


def _text_checksum(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(manifest, sort_keys=True).encode())

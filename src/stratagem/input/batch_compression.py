"""Compression of the arrays of a batch's message, for links between machines."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np

from stratagem.group.transport.wire import Message, numeric_dtype
from stratagem.messages import explain
from stratagem.optional_libraries import load

AUTO, ZSTD = "AUTO", "zstd"
_LEVEL = 1
# Smaller arrays are not worth a call, and larger results not a copy at the receiver.
_LEAST_BYTES = 2**12
_MOST_OF_SIZE = 0.95


def checked_compression(compression: object) -> str | None:
    """Returns a valid compression: "AUTO", "zstd" or None.

    Raises ImportError if "zstd" cannot be used in this process.
    """
    if compression not in (AUTO, ZSTD, None):
        raise ValueError(
            explain(
                f"compression={compression!r} is not supported.",
                expected='"AUTO", "zstd" or None.',
                fix='omit it: "AUTO" compresses batches between machines only, if zstandard is '
                "installed.",
            )
        )
    if compression == ZSTD:
        _library()
    return None if compression is None else str(compression)


def is_available() -> bool:
    """Returns True if zstandard is installed."""
    return importlib.util.find_spec("zstandard") is not None


def _library() -> Any:
    return load("zstandard", needed_by="compression of batches", install="stratagem[zstd]")


def compressed(message: Message) -> Message:
    """Returns a message with compressed arrays, where that makes them smaller.

    Its field `compressed` has the dtype and shape of each compressed array, None for others.
    """
    # Not shared: a compressor serves one thread at a time.
    compressor = _library().ZstdCompressor(level=_LEVEL)
    arrays: list[np.ndarray] = []
    originals: list[list[Any] | None] = []
    for array in message.arrays:
        small = None
        if array.nbytes >= _LEAST_BYTES:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            small = np.frombuffer(compressor.compress(flat), np.uint8)
        if small is None or small.nbytes > _MOST_OF_SIZE * array.nbytes:
            arrays.append(array)
            originals.append(None)
        else:
            arrays.append(small)
            originals.append([array.dtype.name, list(array.shape)])
    return Message(message.kind, {**message.fields, "compressed": originals}, arrays)


def decompressed(message: Message) -> Message:
    """Returns a message with its original arrays. Raises ConnectionError if they are damaged."""
    originals = message.fields.get("compressed")
    if originals is None:
        return message
    try:
        pairs = zip(message.arrays, originals, strict=True)
        arrays = [array if one is None else _decompressed(array, *one) for array, one in pairs]
    except (ConnectionError, ImportError):
        raise
    except Exception as error:
        raise ConnectionError(f"received an invalid compressed batch ({error})") from error
    return Message(message.kind, message.fields, arrays)


def _decompressed(array: np.ndarray, name: str, shape: list[int]) -> np.ndarray:
    library, dtype = _library(), numeric_dtype(name)
    num_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
    # A frame states its size, so that damaged numbers reserve no memory.
    if library.frame_content_size(array) != num_bytes:
        raise ConnectionError(
            f"received an invalid compressed batch (not the size of an array {name} {shape})"
        )
    found = np.empty(num_bytes, np.uint8)
    with library.ZstdDecompressor().stream_reader(array) as reader:
        rest = found.data
        while rest and (count := reader.readinto(rest)):
            rest = rest[count:]
    if rest:
        raise ConnectionError("received an invalid compressed batch (an array ends too early)")
    return found.view(dtype).reshape(shape)

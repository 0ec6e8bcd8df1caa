"""Batches as messages: pytrees of arrays, bit for bit, without pickling.

The structure is JSON. Arrays of numbers are raw bytes; strings are bytes and offsets.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np

from stratagem.environment import load
from stratagem.errors import check_choice, explain
from stratagem.group.transport.wire import Message, numeric_dtype
from stratagem.input.batches import SparseRows, is_sparse, with_sparse_rows

# Compression of the arrays of a batch's message, for links between machines.

AUTO, ZSTD = "AUTO", "zstd"
_LEVEL = 1
# Smaller arrays are not worth a call, and larger results not a copy at the receiver.
_LEAST_BYTES = 2**12
_MOST_OF_SIZE = 0.95


def checked_compression(compression: object) -> str | None:
    """Returns a valid compression: "AUTO", "zstd" or None.

    Raises ImportError if "zstd" cannot be used in this process.
    """
    check_choice("The input service", (AUTO, ZSTD, None), compression=compression)
    if compression == ZSTD:
        _library()
    return None if compression is None else str(compression)


def is_available() -> bool:
    """Returns True if zstandard is installed."""
    return importlib.util.find_spec("zstandard") is not None


def _library() -> Any:
    return load("zstandard", needed_by="compression of batches", install="stratagem[data]")


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


_TEXT, _BYTES, _NOTHING = 0, 1, 2  # kinds of the elements of an array of objects
_RAW_KINDS = "SUMm"  # dtypes that are sent as bytes: strings, dates and times


def pack_batch(batch: object, *, is_compressed: bool = False) -> Message:
    """Returns the message of a batch.

    A batch is made of dicts, lists, tuples, named tuples, None, arrays, Python numbers and strings.
    Sparse arrays become `SparseRows`. Raises TypeError for other values.
    """
    arrays: list[np.ndarray] = []
    structure = _pack(batch, arrays)
    message = Message("batch", {"structure": structure}, arrays)
    return compressed(message) if is_compressed else message


def unpack_batch(message: Message) -> Any:
    """Returns the batch of a message. Its arrays may be read-only views of the message.

    Raises ConnectionError if the message is damaged.
    """
    arrays = iter(decompressed(message).arrays)
    try:
        batch = _unpack(message.fields["structure"], arrays)
        is_whole = next(arrays, None) is None
    except Exception as error:  # Damaged messages: whatever they raise is one error.
        raise ConnectionError(f"received an invalid batch ({error!r})") from error
    if not is_whole:
        raise ConnectionError("received an invalid batch (more arrays than its structure)")
    return batch


def _pack(value: object, arrays: list[np.ndarray]) -> Any:
    """Returns the structure of a value as JSON: a list that begins with its kind."""
    if is_sparse(value):
        (value,) = with_sparse_rows([value])
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return ["dict", [[_key(key), _pack(item, arrays)] for key, item in pairs]]
    if isinstance(value, list | tuple):
        items = [_pack(item, arrays) for item in cast("list[Any]", value)]
        if hasattr(value, "_fields"):
            return ["named", items, type(value).__module__, type(value).__qualname__]
        return ["list" if isinstance(value, list) else "tuple", items]
    if isinstance(value, SparseRows):
        parts = [_pack(part, arrays) for part in (value.values, value.indices)]
        return ["sparse", parts, list(value.shape)]
    return _pack_leaf(value, arrays)


def _pack_leaf(value: object, arrays: list[np.ndarray]) -> Any:
    if isinstance(value, np.generic):
        return ["scalar", _pack_array(np.asarray(value), arrays)]
    if value is None or isinstance(value, bool | int | float | str):
        return ["value", value]
    if isinstance(value, bytes):
        return ["bytes", _pack_array(np.frombuffer(value, np.uint8), arrays)]
    if hasattr(value, "__array__"):
        return _pack_array(np.asarray(value), arrays)
    raise _unsupported(f"a value of type {type(value).__name__}")


def _key(key: object) -> Any:
    if isinstance(key, str | int) and not isinstance(key, np.generic):
        return key
    raise _unsupported(f"a dict with a key of type {type(key).__name__}")


def _pack_array(array: np.ndarray, arrays: list[np.ndarray]) -> Any:
    if array.dtype == object:
        return _pack_objects(array, arrays)
    if array.dtype.kind in _RAW_KINDS or not array.dtype.isnative:
        raw = np.frombuffer(array.tobytes(), np.uint8)
        arrays.append(raw)
        return ["raw", array.dtype.str, list(array.shape)]
    if array.dtype.names is not None or array.dtype.type is np.void:
        raise _unsupported(f"an array of dtype {array.dtype}")
    arrays.append(array)
    return ["array"]


def _pack_objects(array: np.ndarray, arrays: list[np.ndarray]) -> Any:
    """Packs strings, bytes and None as their bytes one after the other, and offsets."""
    parts: list[bytes] = []
    kinds = np.empty(array.size, np.uint8)
    for number, element in enumerate(array.flat):
        if isinstance(element, str):
            parts.append(element.encode("utf-8", "surrogatepass"))
            kinds[number] = _TEXT
        elif isinstance(element, bytes):
            parts.append(element)
            kinds[number] = _BYTES
        elif element is None:
            parts.append(b"")
            kinds[number] = _NOTHING
        else:
            raise _unsupported(f"an array of objects of type {type(element).__name__}")
    offsets = np.zeros(array.size + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    arrays += [np.frombuffer(b"".join(parts), np.uint8), offsets, kinds]
    return ["objects", list(array.shape)]


def _unpack(structure: Any, arrays: Iterator[np.ndarray]) -> Any:
    kind, *details = structure
    if kind not in _UNPACKERS:
        raise ConnectionError(f"received an invalid batch (a part of kind {kind!r})")
    return _UNPACKERS[kind](arrays, *details)


def _items(arrays: Iterator[np.ndarray], items: list[Any]) -> list[Any]:
    return [_unpack(item, arrays) for item in items]


def _raw(arrays: Iterator[np.ndarray], dtype: str, shape: list[int]) -> np.ndarray:
    return np.frombuffer(next(arrays).tobytes(), dtype).reshape(shape)


def _dict(arrays: Iterator[np.ndarray], pairs: list[Any]) -> dict[Any, Any]:
    return {key: _unpack(item, arrays) for key, item in pairs}


def _sparse(arrays: Iterator[np.ndarray], parts: list[Any], shape: list[int]) -> SparseRows:
    values, indices = _items(arrays, parts)
    return SparseRows(values, indices, tuple(shape))


def _objects(arrays: Iterator[np.ndarray], shape: list[int]) -> np.ndarray:
    joined, offsets, kinds = next(arrays).tobytes(), next(arrays).tolist(), next(arrays)
    elements = np.empty(len(kinds), object)
    for number, kind in enumerate(kinds.tolist()):
        part = joined[offsets[number] : offsets[number + 1]]
        if kind != _NOTHING:
            elements[number] = part if kind == _BYTES else part.decode("utf-8", "surrogatepass")
    return elements.reshape(shape)


def _named(arrays: Iterator[np.ndarray], parts: list[Any], module: str, name: str) -> Any:
    """Returns a named tuple of a class of this process; no other class is called."""
    found: Any = sys.modules.get(module) or importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not (isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_fields")):
        raise ConnectionError(f"received an invalid batch ({module}.{name} is no named tuple)")
    return cast("Any", found)._make(_items(arrays, parts))


_UNPACKERS: dict[str, Callable[..., Any]] = {
    "array": next,
    "bytes": lambda arrays, packed: _unpack(packed, arrays).tobytes(),
    "dict": _dict,
    "list": _items,
    "named": _named,
    "objects": _objects,
    "raw": _raw,
    "scalar": lambda arrays, packed: _unpack(packed, arrays)[()],
    "sparse": _sparse,
    "tuple": lambda arrays, items: tuple(_items(arrays, items)),
    "value": lambda arrays, value: value,
}


def _unsupported(what: str) -> TypeError:
    return TypeError(
        explain(
            f"A batch for the input service contains {what}.",
            expected="dicts, lists, tuples, and arrays of numbers, strings or bytes.",
            fix="convert it to an array in the dataset.",
        )
    )

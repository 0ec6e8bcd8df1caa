"""Batches as messages: pytrees of arrays, bit for bit, without pickling.

The structure is JSON. Arrays of numbers are raw bytes; strings are bytes and offsets.
"""

from __future__ import annotations

import importlib
import importlib.util
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from stratagem.environment import load
from stratagem.errors import DataLossError, NotFoundError, check_choice, explain, invalid
from stratagem.group.transport.journal import (
    HEADER_BYTES,
    JournalLock,
    frames_in,
    record_at,
    sync,
    write_all,
    write_record,
)
from stratagem.group.transport.wire import Message, numeric_dtype, pack, unpack
from stratagem.input.batches import SparseRows, is_sparse, with_sparse_rows
from stratagem.input.sources.sequences import SequenceSource
from stratagem.resources import Closing

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


def pack_batch(batch: object, *, is_compressed: bool = False, **fields: Any) -> Message:
    """Returns the message of a batch, with more fields.

    A batch is made of dicts, lists, tuples, named tuples, None, arrays, Python numbers and strings.
    Sparse arrays become `SparseRows`. Raises TypeError for other values.
    """
    arrays: list[np.ndarray] = []
    structure = _pack(batch, arrays)
    message = Message("batch", {**fields, "structure": structure}, arrays)
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


# Snapshots: the batches of a dataset in record files, read in place through memory maps.
#
# A folder has files of batches, and a manifest, which is written last: the place of each batch, in
# the order of the dataset. A folder without a manifest is a snapshot that is not finished.


_HEAD = b"stratagem snapshot 1\n"
_MANIFEST = "manifest"
_MOST_FILE_BYTES = 2**30
_FILES = "batches-*.records"


class RecordFile:
    """A file of a snapshot, mapped into memory: a line that names the format, then records."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self.size_bytes = os.fstat(file.fileno()).st_size
            has_data = self.size_bytes >= len(_HEAD)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if has_data else None
        self.is_valid = self._map is not None and self._map[: len(_HEAD)] == _HEAD

    def part(self, begin: int, end: int) -> memoryview:
        """Returns a byte range of the file."""
        return memoryview(b"" if self._map is None else self._map)[begin:end]

    def record_at(self, place: int) -> int | None:
        """Returns the end of the intact record at an offset, or None."""
        found = record_at(self.part, place, self.size_bytes)
        return None if found is None else found[1]

    def message(self, place: int, end: int) -> Message:
        """Returns the message of an intact record; its arrays are views of the file."""
        return unpack(frames_in(self.part(place + HEADER_BYTES, end)))


class SnapshotBatches(Sequence[Any]):
    """The batches of a finished snapshot. Their arrays are read-only views of its files.

    The checksum of a batch is verified when a process reads it for the first time.

    Args:
        folder: path of the snapshot.

    Raises:
        DataLossError: it is damaged or not finished.
        NotFoundError: there is none.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder).absolute()
        manifest = self._manifest()
        # File number, and where the record begins and ends.
        self._places = np.array(manifest.arrays[0])
        names: list[str] = manifest.fields["files"]
        self._files: list[RecordFile] = []
        for number, name in enumerate(names):
            try:
                file = RecordFile(self._folder / name)
            except FileNotFoundError as error:
                raise _damaged(self._folder, f"the file {name} is missing") from error
            own = self._places[self._places[:, 0] == number, 2]
            if own.max(initial=0) > file.size_bytes:
                raise _damaged(self._folder, f"the file {name} is incomplete")
            self._files.append(file)
        self._is_verified = np.zeros(len(self._places), bool)

    def _manifest(self) -> Message:
        path = self._folder / _MANIFEST
        if not path.exists():
            raise _unfinished(self._folder)
        file = RecordFile(path)
        end = file.record_at(len(_HEAD)) if file.is_valid else None
        if end is None:
            raise _damaged(self._folder, "its manifest is incomplete or of another version")
        return file.message(len(_HEAD), end)

    def __reduce__(self) -> tuple[Any, ...]:
        return SnapshotBatches, (self._folder,)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        number, place, end = self._places[index].tolist()
        file = self._files[number]
        if not self._is_verified[index]:
            if file.record_at(place) != end:
                raise _damaged(
                    self._folder,
                    f"batch {index}, at byte {place} of the file {file.path.name}, fails its "
                    "checksum",
                )
            self._is_verified[index] = True
        return unpack_batch(file.message(place, end))


class SnapshotSource(SequenceSource):
    """The batches of a finished snapshot; see `SnapshotBatches`."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__(SnapshotBatches(folder))


def _unfinished(folder: Path) -> Exception:
    if not folder.is_dir():
        return NotFoundError(
            explain(
                f"There is no snapshot at {folder}.",
                expected="a folder that sg.input.service.save has written.",
                fix="correct the path, or save the dataset there.",
            )
        )
    return DataLossError(
        explain(
            f"The snapshot {folder} is not finished: it has no manifest.",
            expected="a snapshot whose sg.input.service.save has returned.",
            fix="call sg.input.service.save again with the same dataset and path, which continues "
            "it.",
            code="SG314",
        )
    )


def _damaged(folder: Path, how: str) -> DataLossError:
    return DataLossError(
        explain(
            f"The snapshot {folder} is damaged: {how}.",
            expected="unmodified files written by sg.input.service.save.",
            fix="delete the folder, and save the dataset again.",
            code="SG314",
        )
    )


class SnapshotWriter(Closing):
    """Writes batches to the files of a snapshot, after those of an interrupted one.

    `facts` say which dataset it is, as JSON. `position` is what came with the last batch that was
    written completely, None without one.

    Raises:
        FileExistsError: the folder has a finished snapshot.
        ValueError: the folder has an unfinished snapshot of another dataset.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self._folder = folder
        self._facts = facts
        # Batches by split and index: the file number, and where the record begins and ends.
        self._places: dict[tuple[int, int], tuple[int, int, int]] = {}
        self.position: Any = None
        self._names: list[str] = []
        self._file: IO[bytes] | None = None
        self._lock = JournalLock(folder / "snapshot.lock")
        try:
            if (folder / _MANIFEST).exists():
                raise FileExistsError(
                    explain(
                        f"The folder {folder} has a finished snapshot.",
                        expected="a new folder, or one with an unfinished snapshot.",
                        fix="delete the folder to save the dataset anew, or pass another path.",
                    )
                )
            has_gap = False
            for found in sorted(folder.glob(_FILES)):
                has_gap = self._recover(found, has_gap)
        except BaseException:
            self.close()
            raise

    def _recover(self, path: Path, has_gap: bool) -> bool:
        """Finds the intact records of a file; what follows them was not written completely.

        Returns True once batches are missing.
        """
        file = RecordFile(path)
        self._names.append(path.name)
        place = len(_HEAD)
        while file.is_valid and (end := file.record_at(place)) is not None:
            message = file.message(place, end)
            if message.kind == "batch":
                identity = message.fields["split"], message.fields["index"]
                self._places[identity] = len(self._names) - 1, place, end
                if not has_gap:  # Else they are written again.
                    self.position = message.fields["position"]
            elif message.fields["facts"] != self._facts:
                raise invalid(
                    f"The folder {self._folder} has an unfinished snapshot of a dataset with "
                    f"{message.fields['facts']}; this one has {self._facts}.",
                    expected="the same dataset, or a new folder.",
                    fix="delete the folder, or pass another path.",
                )
            else:  # Records before this file may be damaged since.
                has_gap = has_gap or message.fields["position"] != self.position
            place = end
        return has_gap

    def add(self, split: int, index: int, batch: Any, position: Any) -> None:
        """Writes a batch, and the position behind it as JSON."""
        if self._file is not None and self._file.tell() > _MOST_FILE_BYTES:
            self._end_file()
        if self._file is None:
            self._names.append(f"batches-{len(self._names):05}.records")
            self._file = (self._folder / self._names[-1]).open("xb", buffering=0)
            facts = {"facts": self._facts, "position": self.position}
            write_all(self._file, _HEAD)
            write_record(self._file, pack(Message("facts", facts)))
        place = self._file.tell()
        packed = pack_batch(batch, split=split, index=index, position=position)
        write_record(self._file, pack(packed))
        self._places[split, index] = len(self._names) - 1, place, self._file.tell()
        self.position = position

    def _end_file(self) -> None:
        if self._file is not None:
            sync(self._file)
            self._file.close()
            self._file = None

    def finish(self) -> None:
        """Writes the manifest, which makes the snapshot valid."""
        self._end_file()
        places = [self._places[identity] for identity in sorted(self._places)]
        array = np.array(places, np.int64).reshape(-1, 3)
        new = self._folder / f"{_MANIFEST}.new"
        with new.open("wb", buffering=0) as file:
            write_all(file, _HEAD)
            write_record(file, pack(Message("snapshot", {"files": self._names}, [array])))
            sync(file)
        new.replace(self._folder / _MANIFEST)

    def close(self) -> None:
        """Closes the files."""
        if self._file is not None:
            self._file.close()
        self._lock.close()

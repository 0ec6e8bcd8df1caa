"""Append-only journal file of a parameter server, read after a restart.

A record is a length, a checksum, and the frames of a message. If the process or machine dies during
a write, the unfinished last record is truncated on the next start; all earlier records remain.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, overload

from stratagem.closing import Closing
from stratagem.errors import DataLossError
from stratagem.messages import explain
from stratagem.parameter_server.transport.wire import Message, pack, unpack

__all__ = ["Journal"]

_MARK = b"stratagem journal 1\n"
_RECORD = struct.Struct("<QI")  # body size in bytes, CRC-32
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class _Messages(Sequence[Message]):
    """Messages of a journal file, read lazily because memory may not hold all of them."""

    def __init__(self, file: IO[bytes]) -> None:
        self.size_bytes = os.fstat(file.fileno()).st_size
        self._places: list[tuple[int, int]] = []
        self._map: mmap.mmap | None = None
        if self.size_bytes:  # an empty file cannot be mapped
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def part(self, begin: int, end: int) -> memoryview:
        """Returns a byte range of the file, after evicting previously read pages from memory."""
        if self._map is None:
            return memoryview(b"")
        self._map.madvise(mmap.MADV_DONTNEED)
        return memoryview(self._map)[begin:end]

    def add(self, begin: int, end: int) -> None:
        """Adds the message in a byte range of the file."""
        self._places.append((begin, end))

    def clear(self) -> None:
        """Drops all messages and the file mapping."""
        self._places.clear()
        self._map = None

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        begin, end = self._places[index]
        return unpack(_frames(self.part(begin, end)))


class Journal(Closing):
    """Opens or creates a journal file, and its folder.

    `messages` are the recovered messages; call `messages.clear()` after reading them.

    Raises:
        DataLossError: not a journal, or damaged before its last record.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.with_suffix(".new").unlink(missing_ok=True)
        self._file = self._path.open("a+b", buffering=0)
        try:
            self.messages = self._recovered()
        except BaseException:
            self._file.close()
            raise

    @property
    def size_bytes(self) -> int:
        """Size of the file in bytes."""
        return self._file.tell()

    def append(self, message: Message) -> None:
        """Appends a message durably: it is on disk on return.

        If the write fails (OSError), the journal is unchanged.
        """
        size = self._file.tell()
        try:
            _write(self._file, message)
            _sync(self._file)
        except OSError:
            self._file.truncate(size)
            self._file.seek(size)  # `size_bytes` is the position
            raise

    def replace(self, messages: Iterable[Message]) -> None:
        """Atomically replaces the journal with one that contains only these messages.

        If the write fails (OSError), the journal is unchanged.
        """
        new = self._path.with_suffix(".new")
        file = new.open("w+b", buffering=0)
        try:
            _write_all(file, _MARK)
            for message in messages:
                _write(file, message)
            _sync(file)
            new.replace(self._path)
        except BaseException:
            file.close()
            new.unlink(missing_ok=True)
            raise
        _sync_folder(self._path.parent)
        self._file.close()
        self._file = file

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _recovered(self) -> _Messages:
        """Finds all records, and truncates an unfinished last one."""
        messages = _Messages(self._file)
        size = messages.size_bytes
        mark = bytes(messages.part(0, len(_MARK)))
        if mark != _MARK[: len(mark)]:
            raise _damaged(self._path, "it is not a journal of a parameter server")
        place = len(_MARK)
        while place + _RECORD.size <= size:
            begin = place + _RECORD.size
            num_bytes, checksum = _RECORD.unpack(messages.part(place, begin))
            end = begin + num_bytes
            if end > size:
                break
            if zlib.crc32(messages.part(begin, end)) != checksum:
                if end == size:
                    break  # unfinished: not all pages were written
                raise _damaged(self._path, f"the checksum of the record at byte {place} is wrong")
            messages.add(begin, end)
            place = end
        self._file.truncate(min(place, size))
        if size < len(_MARK):
            self._file.truncate(0)
            _write_all(self._file, _MARK)
            _sync(self._file)
        self._file.seek(0, os.SEEK_END)
        return messages


def _write(file: IO[bytes], message: Message) -> None:
    frames = [memoryview(frame).cast("B") for frame in pack(message)]
    parts = [_COUNT.pack(len(frames)), *(_LENGTH.pack(frame.nbytes) for frame in frames), *frames]
    size, checksum = 0, 0
    for part in parts:
        size += len(part)
        checksum = zlib.crc32(part, checksum)
    _write_all(file, _RECORD.pack(size, checksum))
    for part in parts:
        _write_all(file, part)


def _write_all(file: IO[bytes], part: bytes | memoryview) -> None:
    """Writes all bytes unbuffered, so that a failed write leaves no data in a buffer."""
    rest = memoryview(part)
    while rest:
        rest = rest[file.write(rest) :]


def _frames(body: memoryview) -> list[memoryview]:
    (count,) = _COUNT.unpack_from(body)
    place = _COUNT.size + count * _LENGTH.size
    frames: list[memoryview] = []
    for number in range(count):
        (length,) = _LENGTH.unpack_from(body, _COUNT.size + number * _LENGTH.size)
        frames.append(body[place : place + length])
        place += length
    return frames


def _sync(file: IO[bytes]) -> None:
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, how: str) -> DataLossError:
    return DataLossError(
        explain(
            f"The journal {path} is damaged: {how}.",
            expected="an unmodified journal written by a parameter server.",
            fix="start the servers with an empty journal_dir, and restore a checkpoint.",
            code="SG610",
        )
    )

"""A file of messages that is only ever appended to: what a server reads when it is started again.

Each record is a length, a checksum, and the frames of a message. A process or machine that dies
while it writes leaves an unfinished last record, which is cut off; everything before it is there.
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
_RECORD = struct.Struct("<QI")  # bytes of the body, and their checksum
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


class _Messages(Sequence[Message]):
    """Messages of a file, read when they are asked for: there may not be room for all.

    Args:
        file: the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.size_bytes = os.fstat(file.fileno()).st_size
        self._places: list[tuple[int, int]] = []
        self._map: mmap.mmap | None = None
        if self.size_bytes:  # else it cannot be mapped
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def part(self, begin: int, end: int) -> memoryview:
        """Returns the bytes between two places, while no others are in this process."""
        if self._map is None:
            return memoryview(b"")
        self._map.madvise(mmap.MADV_DONTNEED)
        return memoryview(self._map)[begin:end]

    def add(self, begin: int, end: int) -> None:
        """Adds the one that is between two places of the file."""
        self._places.append((begin, end))

    def clear(self) -> None:
        """Forgets them, and the file."""
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
    """Opens a journal, or begins one.

    `messages` are those that it has; `messages.clear()` when they are not needed any more.

    Args:
        path: of the file; its folder is made.

    Raises:
        DataLossError: the file is something else, or was changed before its last record.
        OSError: it cannot be read or written.
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
        """Adds a message; it is on the disk when this returns.

        Args:
            message: the message.

        Raises:
            OSError: it cannot be written; the journal is as it was then.
        """
        size = self._file.tell()
        try:
            _write(self._file, message)
            _sync(self._file)
        except OSError:
            self._file.truncate(size)
            self._file.seek(size)  # from where the size is told the next time
            raise

    def replace(self, messages: Iterable[Message]) -> None:
        """Writes a new journal in place of this one, all or nothing.

        Args:
            messages: all that is to be in it.

        Raises:
            OSError: it cannot be written; the journal is as it was then.
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
        """Finds all records, and cuts off an unfinished one."""
        messages = _Messages(self._file)
        size = messages.size_bytes
        mark = bytes(messages.part(0, len(_MARK)))
        if mark != _MARK[: len(mark)]:
            raise _damaged(self._path, "it is no journal of a parameter server")
        place = len(_MARK)
        while place + _RECORD.size <= size:
            begin = place + _RECORD.size
            num_bytes, checksum = _RECORD.unpack(messages.part(place, begin))
            end = begin + num_bytes
            if end > size:
                break
            if zlib.crc32(messages.part(begin, end)) != checksum:
                if end == size:
                    break  # its pages were not all written
                raise _damaged(self._path, f"the record at byte {place} was changed")
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
    """Nothing is buffered, so that nothing is left over of a write that failed."""
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
            expected="the file as a parameter server wrote it.",
            fix="restore a checkpoint, and start the servers with an empty folder.",
        )
    )

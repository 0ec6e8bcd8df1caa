"""Append-only journal file of a parameter server, read after a restart.

The file begins with a line that names the format and its version. The frames of a record are those
of a message: JSON and raw arrays. Reading a journal never executes code from it. Only its user can
read the file.

If the process or machine dies during a write, the unfinished last record is dropped on the next
start, with a warning; all earlier records remain. Damage before the last record raises an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import platform
import shutil
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any

from stratagem import settings
from stratagem.errors import DataLossError, UnavailableError, explain
from stratagem.group.transport.wire import Message, pack, unpack
from stratagem.resources import Closing, are_free, own_folders

# Records of files with checksums: journals, saved tables and snapshots.
#
# A record is a header (mark, size, checksum of the body, checksum of the header) and a body: a
# number of frames, their lengths, and the frames.

MARK = b"\xf5SJR"
_RECORD = struct.Struct("<4sQI")  # mark, body size in bytes, CRC-32 of the body
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the above
HEADER_BYTES = _RECORD.size + _CHECKSUM.size
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def record_at(
    part: Callable[[int, int], memoryview], place: int, size_bytes: int
) -> tuple[int, int] | None:
    """Returns the byte range of the body of an intact record, or None.

    `part` returns a byte range of the file, which has `size_bytes`.
    """
    begin = place + HEADER_BYTES
    header = bytes(part(place, begin))
    if len(header) < HEADER_BYTES:
        return None
    mark, num_bytes, checksum = _RECORD.unpack_from(header)
    (of_header,) = _CHECKSUM.unpack_from(header, _RECORD.size)
    if mark != MARK or zlib.crc32(header[: _RECORD.size]) != of_header:
        return None
    end = begin + num_bytes
    if end > size_bytes or zlib.crc32(part(begin, end)) != checksum:
        return None
    return begin, end


def write_record(file: IO[bytes], packed: Sequence[Any]) -> None:
    """Writes a record with these frames."""
    frames = [memoryview(frame).cast("B") for frame in packed]
    parts = [_COUNT.pack(len(frames)), *(_LENGTH.pack(frame.nbytes) for frame in frames), *frames]
    size, checksum = 0, 0
    for part in parts:
        size += len(part)
        checksum = zlib.crc32(part, checksum)
    header = _RECORD.pack(MARK, size, checksum)
    write_all(file, header + _CHECKSUM.pack(zlib.crc32(header)))
    for part in parts:
        write_all(file, part)


def last_frame_offset(sizes_bytes: Sequence[int]) -> int:
    """Returns the offset of the last frame in a record, given the sizes of the frames before it."""
    lengths = _LENGTH.size * (len(sizes_bytes) + 1)
    return HEADER_BYTES + _COUNT.size + lengths + sum(sizes_bytes)


def write_all(file: IO[bytes], part: bytes | memoryview) -> None:
    """Writes all bytes unbuffered, so that a failed write leaves no data in a buffer."""
    rest = memoryview(part)
    while rest:
        rest = rest[file.write(rest) :]


def frames_in(body: memoryview) -> list[memoryview]:
    """Returns the frames in a record; raises ConnectionError if it is none, as `unpack` does."""
    try:
        (count,) = _COUNT.unpack_from(body)
        lengths = struct.unpack_from(f"<{count}Q", body, _COUNT.size)
    except struct.error as error:
        raise ConnectionError(f"invalid frames ({error})") from error
    place = _COUNT.size + count * _LENGTH.size
    frames: list[memoryview] = []
    for length in lengths:
        frames.append(body[place : place + length])
        place += length
    return frames


def sync(file: IO[bytes]) -> None:
    """Waits until a file is on disk."""
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


_FORMAT = b"stratagem journal "
_VERSION = 3
_HEAD = _FORMAT + b"%d\n" % _VERSION


class _Messages(Sequence[Message]):
    """Messages of a journal file, read lazily because memory may not hold all of them."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
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

    def record(self, place: int) -> tuple[int, int] | None:
        """Returns the byte range of the body of an intact record, or None."""
        return record_at(self.part, place, self.size_bytes)

    def add(self, begin: int, end: int) -> None:
        """Adds the message in a byte range of the file."""
        self._places.append((begin, end))

    def find_mark(self, begin: int) -> int:
        """Returns the offset of the next record mark from `begin` on; -1 if there is none."""
        return -1 if self._map is None else self._map.find(MARK, begin)

    def clear(self) -> None:
        """Drops all messages and the file mapping."""
        self._places.clear()
        self._map = None

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        begin, end = self._places[index]
        try:
            return unpack(frames_in(self.part(begin, end)))
        except ConnectionError as error:
            raise invalid_journal(self._path, error) from error


class Journal(Closing):
    """Opens or creates a journal file, and its folder.

    `messages` are the recovered messages; call `messages.clear()` after reading them. `num_dropped`
    counts the records of a damaged end, which are dropped with a RuntimeWarning.

    Raises:
        DataLossError: not a journal, one of another version, or damaged before its last record.
        OSError: the file cannot be read or written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.with_suffix(".new").unlink(missing_ok=True)
        self._file = _opened(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        self.num_dropped = 0
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
            write_record(self._file, pack(message))
            sync(self._file)
        except OSError:
            self._file.truncate(size)
            self._file.seek(size)  # `size_bytes` is the position
            raise

    def replace(self, messages: Iterable[Message]) -> None:
        """Atomically replaces the journal with one that contains only these messages.

        If the write fails (OSError), the journal is unchanged.
        """
        new = self._path.with_suffix(".new")
        file = _opened(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(file, _HEAD)
            for message in messages:
                write_record(file, pack(message))
            sync(file)
            new.replace(self._path)
        except BaseException:
            file.close()
            new.unlink(missing_ok=True)
            raise
        sync_folder(self._path.parent)
        self._file.close()
        self._file = file

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _recovered(self) -> _Messages:
        """Finds all records, and drops a damaged end."""
        messages = _Messages(self._path, self._file)
        size = messages.size_bytes
        head = bytes(messages.part(0, len(_HEAD)))
        self._check_head(head)
        place = len(_HEAD)
        while place < size and (record := messages.record(place)):
            messages.add(*record)
            place = record[1]
        if size < len(_HEAD):
            self._file.truncate(0)
            write_all(self._file, _HEAD)
            sync(self._file)
            sync_folder(self._path.parent)
        elif place < size:
            self._drop(messages, place)
        self._file.seek(0, os.SEEK_END)
        return messages

    def _check_head(self, head: bytes) -> None:
        if head == _HEAD[: len(head)]:
            return
        if head.startswith(_FORMAT):
            version = head[len(_FORMAT) :].partition(b"\n")[0].decode("ascii", "replace")
            raise _other_version(self._path, version)
        raise _damaged(self._path, "it is not a journal of a parameter server")

    def _drop(self, messages: _Messages, place: int) -> None:
        """Drops the end of the file from `place` on, unless an intact record follows."""
        num_marks, at = 0, messages.find_mark(place)
        while at >= 0:
            num_marks += 1
            if at > place and messages.record(at):
                raise _damaged(
                    self._path,
                    f"the record at byte {place} fails its checksum, after {len(messages)} intact "
                    f"ones, and the record at byte {at} is intact",
                )
            at = messages.find_mark(at + 1)
        self.num_dropped = max(1, num_marks)
        lost = messages.size_bytes - place
        self._file.truncate(place)
        sync(self._file)
        records = "1 record" if self.num_dropped == 1 else f"{self.num_dropped} records"
        warnings.warn(
            explain(
                f"The end of the journal {self._path} is damaged: {records} of {lost} bytes from "
                f"byte {place} on were dropped. The {len(messages)} records before are intact.",
                expected="a last record that was written completely.",
                fix="nothing, if the machine or the server stopped during a write: changes since "
                "the last complete record are lost. Otherwise, check the disk.",
                code="SG610",
            ),
            RuntimeWarning,
            stacklevel=4,
        )


def _opened(path: Path, flags: int) -> IO[bytes]:
    """Opens a file that only this user can read, without a buffer."""
    descriptor = os.open(path, flags, 0o600)
    try:
        os.fchmod(descriptor, 0o600)  # a file that is already there
        return os.fdopen(descriptor, "a+b" if flags & os.O_APPEND else "w+b", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def invalid_journal(path: Path, error: Exception) -> DataLossError:
    """Returns the error of a journal whose records are intact, but not those of a server."""
    return _damaged(path, f"a record has an intact checksum and invalid contents ({error!r})")


def _other_version(path: Path, version: str) -> DataLossError:
    return DataLossError(
        explain(
            f"The journal {path} has version {version} of the format.",
            expected=f"version {_VERSION}.",
            fix="save a checkpoint with the Stratagem version that wrote the journal, start the "
            "servers with an empty journal_dir, and restore the checkpoint.",
            code="SG610",
        )
    )


def _damaged(path: Path, how: str) -> DataLossError:
    return DataLossError(
        explain(
            f"The journal {path} is damaged: {how}.",
            expected="an unmodified journal written by a parameter server.",
            fix="start the servers with an empty journal_dir, and restore a checkpoint.",
            code="SG610",
        )
    )


# Lock that gives one process at a time the right to write a journal.

_POLL_S = 0.05


class JournalLock(Closing):
    """Waits for and holds an exclusive lock, because a lost server may take a moment to exit.

    The lock is a separate file, because the journal file gets replaced. The operating system
    releases it when the process exits. Creates the folder of `path`.

    Raises:
        UnavailableError: another process holds it for longer than `STRATAGEM_PEER_TIMEOUT_S`.
        OSError: the file cannot be opened, or the file system does not support locks.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            self._wait()
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {platform.node()}".encode(), 0)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases the lock."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _wait(self) -> None:
        limit_s = float(settings.read("peer_timeout_s"))
        deadline_s = time.monotonic() + limit_s
        while not self._try():
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    explain(
                        f"{self._path.with_suffix('')} is in use by {self._path.read_text()}, and "
                        f"was not released within {limit_s:g} s.",
                        expected="one server per journal; the previous server must have exited.",
                        fix="stop that process, or start the servers with another journal_dir. "
                        "Set STRATAGEM_PEER_TIMEOUT_S to change the limit.",
                        code="SG610",
                    )
                )
            threading.Event().wait(_POLL_S)

    def _try(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False


# Removal of journals that no run uses any more.


# A server that died may be about to restart, and its coordinator may be on another machine.
_ABANDONED_S = 24 * 3600.0


def remove_journal(journal: Path) -> None:
    """Removes a journal that no later run uses, its lock, and folders that are then empty."""
    for path in (journal, Path(f"{journal}.lock")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other servers use them
        journal.parent.rmdir()
        journal.parent.parent.rmdir()


def sweep_journals(base: Path) -> None:
    """Removes this user's journal folders in `base` that no process has used for a day."""
    for folder in own_folders(base, "*"):
        with contextlib.suppress(OSError):  # something was removed meanwhile
            newest_s = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
            if time.time() - newest_s > _ABANDONED_S and are_free(folder):
                shutil.rmtree(folder, ignore_errors=True)

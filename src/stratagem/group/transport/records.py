"""Records of files with checksums: journals, saved tables and snapshots.

A record is a header (mark, size, checksum of the body, checksum of the header) and a body: a
number of frames, their lengths, and the frames.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

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

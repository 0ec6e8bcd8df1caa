"""Messages in a file, as records: a header with checksums, then the frames of a message.

A header is a mark, the size and the checksum of the body, and its own checksum. A body is the
number of frames, their sizes, and the frames. Reading a record never executes code from it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import IO

from stratagem.transport.wire import Message, pack, unpack

__all__ = ["HEADER_BYTES", "MARK", "find_record", "read_record", "write_all", "write_record"]

MARK = b"\xf5SJR"
_RECORD = struct.Struct("<4sQI")  # mark, body size in bytes, CRC-32 of the body
_CHECKSUM = struct.Struct("<I")  # CRC-32 of the above
HEADER_BYTES = _RECORD.size + _CHECKSUM.size
_COUNT = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


def write_record(file: IO[bytes], message: Message) -> None:
    """Writes a message as a record to an unbuffered file."""
    frames = [memoryview(frame).cast("B") for frame in pack(message)]
    parts = [_COUNT.pack(len(frames)), *(_LENGTH.pack(frame.nbytes) for frame in frames), *frames]
    size, checksum = 0, 0
    for part in parts:
        size += len(part)
        checksum = zlib.crc32(part, checksum)
    header = _RECORD.pack(MARK, size, checksum)
    write_all(file, header + _CHECKSUM.pack(zlib.crc32(header)))
    for part in parts:
        write_all(file, part)


def write_all(file: IO[bytes], part: bytes | memoryview) -> None:
    """Writes all bytes unbuffered, so that a failed write leaves no data in a buffer."""
    rest = memoryview(part)
    while rest:
        rest = rest[file.write(rest) :]


def find_record(
    part: Callable[[int, int], memoryview], size_bytes: int, place: int
) -> tuple[int, int] | None:
    """Returns the byte range of the body of an intact record, or None.

    Args:
        part: returns a byte range of the file.
        size_bytes: size of the file.
        place: offset of the record.
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


def read_record(body: memoryview) -> Message:
    """Returns the message in the body of a record, whose arrays refer to it.

    Raises ConnectionError if there is none, as `unpack` does.
    """
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
    return unpack(frames)

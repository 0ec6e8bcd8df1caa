"""What travels between workers and parameter servers: a header of JSON, and arrays as they are.

A message is a list of frames: the header, then the bytes of each array, neither copied nor
pickled on either side. Small arrays follow the header in its own frame: a frame costs more than
they do.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["HERE", "KNOWN", "Message", "PING", "UNKNOWN", "WHERE", "is_message", "pack", "unpack"]

# Of a part of an array.
_FRAME_BYTES = 2**20
# Of an array in the frame of the header, and of all of them.
_SMALL_BYTES, _MOST_SMALL_BYTES = 2**13, 2**17
# Where an array begins in that frame; which no text of JSON contains.
_ALIGNMENT, _END = 16, b"\0"

assert ml_dtypes  # by whose import NumPy knows bfloat16 and its like by name

# In place of a header: what a connection itself asks and answers. A client asks whether its request
# is worked on, and where the server can be found by processes on its machine.
PING, KNOWN, UNKNOWN = b"ping", b"known", b"unknown"
WHERE, HERE = b"where", b"here"


@dataclasses.dataclass(frozen=True)
class Message:
    """One message.

    Args:
        kind: what it asks or answers.
        fields: of what JSON can hold.
        arrays: of numbers; those that were received are read-only views of what arrived.
    """

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    arrays: Sequence[np.ndarray] = ()


def pack(message: Message) -> list[Any]:
    """Returns a message as the frames that `unpack` takes.

    Args:
        message: the message.

    Returns:
        Buffers, which share memory with the arrays.
    """
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    header = {
        "kind": message.kind,
        "fields": message.fields,
        "arrays": [[array.dtype.name, array.shape] for array in arrays],
    }
    first = bytearray(json.dumps(header, separators=(",", ":")).encode())
    first += _END
    begins = _Begins(len(first))
    frames: list[Any] = [first]
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        begin = begins.next(flat.nbytes)
        if begin is None:
            frames += _parts(flat)
        else:
            first += bytes(begin - len(first))
            first += flat.data
    return frames


def is_message(frames: Sequence[Any]) -> bool:
    """Returns whether frames hold a message, or what a connection itself asks or answers.

    Args:
        frames: buffers.
    """
    return not frames or bytes(frames[0][:8]) not in (PING, KNOWN, UNKNOWN, WHERE, HERE)


def unpack(frames: Sequence[Any]) -> Message:
    """Returns the message that frames hold.

    Args:
        frames: buffers.

    Returns:
        The message.

    Raises:
        ConnectionError: they hold none.
    """
    try:
        first, rest = bytes(frames[0]), iter(frames[1:])
        size = first.index(_END)
        header = json.loads(first[:size])
        begins = _Begins(size + len(_END))
        arrays = [_array(dtype, shape, first, begins, rest) for dtype, shape in header["arrays"]]
        if begins.end != len(first) or any(True for _ in rest):
            raise ConnectionError("a message that is none of this library's (more than its arrays)")
        return Message(str(header["kind"]), dict(header["fields"]), arrays)
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConnectionError(f"a message that is none of this library's ({error})") from error


class _Begins:
    """Where arrays begin in the first frame: the same for who packs and who unpacks.

    Args:
        size: of the header.

    `end` is where the next one may begin.
    """

    def __init__(self, size: int) -> None:
        self.end = size
        self._limit = size + _MOST_SMALL_BYTES

    def next(self, num_bytes: int) -> int | None:
        """Returns where an array begins; None for one that has frames of its own."""
        begin = self.end + -self.end % _ALIGNMENT
        if num_bytes > _SMALL_BYTES or begin + num_bytes > self._limit:
            return None
        self.end = begin + num_bytes
        return begin


def _parts(flat: np.ndarray) -> list[Any]:
    """Bytes of an array, in parts: one is encrypted while another is sent and a third read."""
    return [
        flat[begin : begin + _FRAME_BYTES].data for begin in range(0, flat.nbytes, _FRAME_BYTES)
    ]


def _array(
    dtype: str, shape: Any, first: bytes, begins: _Begins, rest: Iterator[Any]
) -> np.ndarray:
    kind = np.dtype(dtype)
    shape = tuple(map(operator.index, shape))
    num_bytes = math.prod(shape) * kind.itemsize
    begin = begins.next(num_bytes)
    if begin is not None:
        parts = [np.frombuffer(first[begin : begin + num_bytes], np.uint8)]
    else:
        frames = itertools.islice(rest, -(-num_bytes // _FRAME_BYTES))
        parts = [np.frombuffer(frame, np.uint8) for frame in frames]
    got_bytes = sum(part.nbytes for part in parts)
    if kind.hasobject or min(shape, default=0) < 0 or got_bytes != num_bytes:
        raise ConnectionError(f"{got_bytes} bytes came for an array {dtype} {list(shape)}")
    # One part is read where it arrived.
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    flat.flags.writeable = False
    return flat.view(kind).reshape(shape)

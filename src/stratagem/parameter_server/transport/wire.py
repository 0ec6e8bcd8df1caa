"""Framing of messages: a JSON header, and arrays as raw bytes.

A message is a list of frames: the header, then the bytes of each array, neither copied nor
pickled on either side. Small arrays follow the header in its own frame: a frame costs more than
they do. Large ones are cut into several where they go by a socket.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import ml_dtypes
import numpy as np

__all__ = [
    "HERE",
    "KNOWN",
    "Message",
    "PING",
    "SHARE",
    "SHARED",
    "UNKNOWN",
    "WHERE",
    "in_parts",
    "is_message",
    "pack",
    "unpack",
]

# Of a part of an array.
_FRAME_BYTES = 2**20
# Of an array in the frame of the header, and of all of them.
_SMALL_BYTES, _MOST_SMALL_BYTES = 2**13, 2**17
# Where an array begins in that frame; which no text of JSON contains.
_ALIGNMENT, _END = 16, b"\0"

_NOTHING = np.empty(0, np.uint8)

assert ml_dtypes  # by whose import NumPy knows bfloat16 and its like by name

# In place of a header: what a connection itself asks and answers. A client asks whether its request
# is worked on, where the server can be found by processes on its machine, and to share memory.
PING, KNOWN, UNKNOWN = b"ping", b"known", b"unknown"
WHERE, HERE = b"where", b"here"
SHARE, SHARED = b"share", b"shared"
_CONTROLS = frozenset({PING, KNOWN, UNKNOWN, WHERE, HERE, SHARE, SHARED})


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
        "arrays": [[_name_of(array.dtype), array.shape] for array in arrays],
    }
    first = bytearray(json.dumps(header, separators=(",", ":")).encode())
    begins = _Begins(len(first))
    frames: list[Any] = [first]
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        begin = begins.next(flat.nbytes)
        if begin is None:
            frames.append(flat)
        else:
            first += bytes(begin - len(first))  # the first of these ends the header
            first += flat.data
    return frames


def in_parts(frames: Sequence[Any]) -> list[Any]:
    """Returns frames none of which is large: one is encrypted while another is sent.

    Args:
        frames: a message.

    Returns:
        Frames that `unpack` takes as well.
    """
    parts: list[Any] = []
    for frame in frames:
        if len(frame) <= _FRAME_BYTES:
            parts.append(frame)
            continue
        view = memoryview(frame)
        parts += [view[at : at + _FRAME_BYTES] for at in range(0, len(frame), _FRAME_BYTES)]
    return parts


def is_message(frames: Sequence[Any]) -> bool:
    """Returns whether frames hold a message, or what a connection itself asks or answers.

    Args:
        frames: buffers.
    """
    return not frames or bytes(frames[0][:8]) not in _CONTROLS


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
        text, _, _ = first.partition(_END)
        header = json.loads(text)
        begins = _Begins(len(text))
        arrays = [_array(dtype, shape, first, begins, rest) for dtype, shape in header["arrays"]]
        if len(first) not in (len(text), begins.end) or any(True for _ in rest):
            raise ConnectionError("a message that is none of this library's (more than its arrays)")
        return Message(str(header["kind"]), dict(header["fields"]), arrays)
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConnectionError(f"a message that is none of this library's ({error})") from error


class _Begins:
    """Offsets of arrays in the first frame, for both sides.

    Args:
        size: of the header.

    `end` is where the next one may begin.
    """

    def __init__(self, size: int) -> None:
        self.end = size + len(_END)
        self._limit = size + _MOST_SMALL_BYTES

    def next(self, num_bytes: int) -> int | None:
        """Returns where an array begins; None for one that has frames of its own."""
        begin = self.end + -self.end % _ALIGNMENT
        if num_bytes > _SMALL_BYTES or begin + num_bytes > self._limit:
            return None
        self.end = begin + num_bytes
        return begin


def _array(
    dtype: str, shape: Any, first: bytes, begins: _Begins, rest: Iterator[Any]
) -> np.ndarray:
    kind = _dtype(dtype)
    shape = tuple(map(operator.index, shape))
    num_bytes = math.prod(shape) * kind.itemsize
    begin = begins.next(num_bytes)
    if begin is not None:
        parts = [np.frombuffer(first[begin : begin + num_bytes], np.uint8)]
    else:
        parts = _taken(num_bytes, rest)
    # One part is read where it arrived.
    flat = parts[0] if len(parts) == 1 else np.concatenate([*parts, _NOTHING])
    if flat.nbytes != num_bytes or kind.hasobject or min(shape, default=0) < 0:
        raise ConnectionError(f"{flat.nbytes} bytes came for an array {dtype} {list(shape)}")
    flat.flags.writeable = False
    return flat.view(kind).reshape(shape)


# NumPy makes both anew each time, which takes longer than all else that is done with an array.
@functools.lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name


@functools.lru_cache
def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(name)


def _taken(num_bytes: int, frames: Iterator[Any]) -> list[np.ndarray]:
    """As many frames as have these bytes, where there are so many."""
    parts: list[np.ndarray] = []
    while num_bytes > 0 and (frame := next(frames, None)) is not None:
        parts.append(np.frombuffer(frame, np.uint8))
        num_bytes -= parts[-1].nbytes
    return parts

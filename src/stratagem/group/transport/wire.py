"""Message framing: a JSON header, and arrays as raw bytes.

A message is a list of frames: the header, then the bytes of each array, without copying or
pickling. Small arrays are appended to the header's frame, because a frame costs more than they do.
Large arrays are split into several frames on a socket.
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

# Largest frame on a socket.
_FRAME_BYTES = 2**20
# The same with the fields of encryption; longer frames are from strangers.
MOST_FRAME_BYTES = _FRAME_BYTES + 2**10
# Limits for one array in the header's frame, and for all of them.
_SMALL_BYTES, _MOST_SMALL_BYTES = 2**13, 2**17
# Alignment of arrays in that frame, and the end of the header: a byte that JSON never contains.
_ALIGNMENT, _END = 16, b"\0"

_MORE = 2  # ZMQ_SNDMORE

# Kinds of dtypes; those of ml_dtypes, such as bfloat16, are "V".
_NUMERIC = "biufcV"

_NOTHING = np.empty(0, np.uint8)

# Without the checks that `json.dumps` and `json.loads` make first in each call.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_decode = json.JSONDecoder().raw_decode

assert ml_dtypes  # its import registers bfloat16 and similar dtype names with NumPy

# Control frames, in place of a header. Clients ask if the server is working on a request (PING),
# and to share memory (SHARE).
PING, KNOWN, UNKNOWN = b"ping", b"known", b"unknown"
SHARE, SHARED = b"share", b"shared"
_CONTROLS = frozenset({PING, KNOWN, UNKNOWN, SHARE, SHARED})


@dataclasses.dataclass(frozen=True)
class Message:
    """One message.

    Args:
        kind: request or answer type.
        fields: JSON-serializable values.
        arrays: numeric arrays; received ones are read-only views of the received bytes.
    """

    kind: str
    fields: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    arrays: Sequence[np.ndarray] = ()


def pack(message: Message) -> list[Any]:
    """Returns the frames of a message. They share memory with its arrays."""
    arrays = [np.asarray(array, order="C") for array in message.arrays]
    header = {
        "kind": message.kind,
        "fields": message.fields,
        "arrays": [[_name_of(array.dtype), array.shape] for array in arrays],
    }
    first = bytearray(_encode(header).encode())
    begins = _Begins(len(first))
    frames: list[Any] = [first]
    for array in arrays:
        flat = array.reshape(-1).view(np.uint8)
        begin = begins.next(flat.nbytes)
        if begin is None:
            frames.append(flat)
        else:
            first += bytes(begin - len(first))  # the first padding byte ends the header
            first += flat.data
    return frames


def in_parts(frames: Sequence[Any]) -> list[Any]:
    """Splits large frames, so that one part is encrypted while another is sent."""
    parts: list[Any] = []
    for frame in frames:
        if len(frame) <= _FRAME_BYTES:
            parts.append(frame)
            continue
        view = memoryview(frame)
        parts += [view[at : at + _FRAME_BYTES] for at in range(0, len(frame), _FRAME_BYTES)]
    return parts


def send_parts(socket: Any, parts: Sequence[Any], flags: int = 0) -> None:
    """Sends the parts of a message on a socket, without pyzmq's checks of each."""
    for part in parts[:-1]:
        socket.send(part, _MORE | flags, copy=False)
    socket.send(parts[-1], flags, copy=False)


def receive_parts(socket: Any) -> list[Any]:
    """Receives the parts of a message from a socket, as frames."""
    parts = [socket.recv(copy=False)]
    while parts[-1].more:
        parts.append(socket.recv(copy=False))
    return parts


def is_message(frames: Sequence[Any]) -> bool:
    """Returns True for a message, and False for a control frame of the connection."""
    return not frames or bytes(frames[0][:8]) not in _CONTROLS


def unpack(frames: Sequence[Any]) -> Message:
    """Returns the message in the frames. Raises ConnectionError if they are invalid."""
    try:
        first, rest = bytes(frames[0]), iter(frames[1:])
        text, _, _ = first.partition(_END)
        characters = text.decode()
        header, end = _decode(characters)
        begins = _Begins(len(text))
        arrays = [_array(dtype, shape, first, begins, rest) for dtype, shape in header["arrays"]]
        is_whole = end == len(characters) and len(first) in (len(text), begins.end)
        if not is_whole or any(True for _ in rest):
            raise ConnectionError("received an invalid message (more bytes than its arrays)")
        return Message(str(header["kind"]), dict(header["fields"]), arrays)
    except Exception as error:  # Strangers' bytes: whatever they raise must not end a thread.
        raise ConnectionError(f"received an invalid message ({error})") from error


class _Begins:
    """Allocator of array offsets in the first frame, identical on both sides.

    `size` is the size of the header in bytes; `end` is the lowest offset of the next array.
    """

    def __init__(self, size: int) -> None:
        self.end = size + len(_END)
        self._limit = size + _MOST_SMALL_BYTES

    def next(self, num_bytes: int) -> int | None:
        """Returns the offset of an array, or None if it gets separate frames."""
        begin = self.end + -self.end % _ALIGNMENT
        if num_bytes > _SMALL_BYTES or begin + num_bytes > self._limit:
            return None
        self.end = begin + num_bytes
        return begin


def _array(
    dtype: str, shape: Sequence[int], first: bytes, begins: _Begins, rest: Iterator[Any]
) -> np.ndarray:
    kind = numeric_dtype(dtype)
    shape = tuple(map(operator.index, shape))
    num_bytes = math.prod(shape) * kind.itemsize
    begin = begins.next(num_bytes)
    if begin is not None:
        parts = [np.frombuffer(first[begin : begin + num_bytes], np.uint8)]
    else:
        parts = _taken(num_bytes, rest)
    # A single part is read in place.
    flat = parts[0] if len(parts) == 1 else np.concatenate([*parts, _NOTHING])
    if flat.nbytes != num_bytes or min(shape, default=0) < 0:
        raise ConnectionError(f"received {flat.nbytes} bytes for an array {dtype} {list(shape)}")
    flat.flags.writeable = False
    return flat.view(kind).reshape(shape)


# Cached: creating these in NumPy takes longer than all other work on an array.
@functools.lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return dtype.name


@functools.lru_cache
def numeric_dtype(name: str) -> np.dtype[Any]:
    """Returns the dtype of this name. Raises ValueError if it is not numeric."""
    kind = np.dtype(name) if name.isidentifier() else None  # else NumPy would parse an expression
    if kind is None or kind.kind not in _NUMERIC or kind.type is np.void:
        raise ValueError(f"{name!r} is no numeric dtype")
    return kind


def _taken(num_bytes: int, frames: Iterator[Any]) -> list[np.ndarray]:
    """Takes frames until they hold `num_bytes`, or none are left."""
    parts: list[np.ndarray] = []
    while num_bytes > 0 and (frame := next(frames, None)) is not None:
        parts.append(np.frombuffer(frame, np.uint8))
        num_bytes -= parts[-1].nbytes
    return parts

"""What travels between workers and parameter servers: a header of JSON, and arrays as they are.

A message is a list of frames: the header, then the bytes of each array, neither copied nor
pickled on either side.
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
    text = json.dumps(header, separators=(",", ":")).encode()
    return [text, *itertools.chain.from_iterable(map(_frames, arrays))]


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
        header = json.loads(bytes(frames[0]))
        rest = iter(frames[1:])
        arrays = [_array(dtype, shape, rest) for dtype, shape in header["arrays"]]
        if any(True for _ in rest):
            raise ConnectionError("a message that is none of this library's (more than its arrays)")
        return Message(str(header["kind"]), dict(header["fields"]), arrays)
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConnectionError(f"a message that is none of this library's ({error})") from error


def _frames(array: np.ndarray) -> list[Any]:
    """The bytes of an array, in parts: one is encrypted while another is sent and a third read."""
    flat = array.reshape(-1).view(np.uint8)
    parts = range(0, max(1, flat.nbytes), _FRAME_BYTES)
    return [flat[begin : begin + _FRAME_BYTES].data for begin in parts]


def _array(dtype: str, shape: Any, frames: Iterator[Any]) -> np.ndarray:
    kind = np.dtype(dtype)
    shape = tuple(map(operator.index, shape))
    num_bytes = math.prod(shape) * kind.itemsize
    num_frames = max(1, -(-num_bytes // _FRAME_BYTES))
    parts = [np.frombuffer(frame, np.uint8) for frame in itertools.islice(frames, num_frames)]
    if not parts:
        raise ConnectionError("a message that is none of this library's (fewer than its arrays)")
    got_bytes = sum(part.nbytes for part in parts)
    if kind.hasobject or min(shape, default=0) < 0 or got_bytes != num_bytes:
        raise ConnectionError(f"{got_bytes} bytes came for an array {dtype} {list(shape)}")
    # One part is read where it arrived.
    flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
    flat.flags.writeable = False
    return flat.view(kind).reshape(shape)

"""What travels between workers and parameter servers: a header of JSON, and arrays as they are.

A message is a list of frames: the header, then the bytes of each array, neither copied nor
pickled on either side.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["HERE", "KNOWN", "Message", "PING", "UNKNOWN", "WHERE", "is_message", "pack", "unpack"]

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
    return [text, *(array.reshape(-1).view(np.uint8).data for array in arrays)]


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
        arrays = [
            _array(dtype, shape, frame)
            for (dtype, shape), frame in zip(header["arrays"], frames[1:], strict=True)
        ]
        return Message(str(header["kind"]), dict(header["fields"]), arrays)
    except (IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ConnectionError(f"a message that is none of this library's ({error})") from error


def _array(dtype: str, shape: Any, frame: Any) -> np.ndarray:
    kind = np.dtype(dtype)
    shape = tuple(map(operator.index, shape))
    if (
        kind.hasobject
        or min(shape, default=0) < 0
        or math.prod(shape) * kind.itemsize != memoryview(frame).nbytes
    ):
        num_bytes = memoryview(frame).nbytes
        raise ConnectionError(f"{num_bytes} bytes came for an array {dtype} {list(shape)}")
    return np.frombuffer(frame, kind).reshape(shape)

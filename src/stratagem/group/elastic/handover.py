"""State of a running training, sent to members that have just joined."""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stratagem.errors import DataLossError
from stratagem.group.elastic.peer_connections import PeerConnections
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True)
class TrainingState:
    """State of a training: a JSON document, and arrays in an order that both sides know."""

    document: dict[str, Any]
    arrays: Sequence[np.ndarray[Any, Any]]


def hand_over(
    connections: PeerConnections,
    source: int,
    newcomers: Sequence[int],
    state: Callable[[], TrainingState] | None,
) -> None:
    """Sends the state of member `source` to newcomers; all other members call it as well.

    `state` returns it on the source, and is None on the others. Raises PeerLostError.
    """
    if state is None:
        for _ in range(3):
            connections.broadcast(source, newcomers, [])
        return
    sent = state()
    arrays = [np.asarray(array, order="C") for array in sent.arrays]
    buffers = [_bytes_of(array) for array in arrays]
    layout = [
        [array.dtype.name, list(array.shape), zlib.crc32(buffer)]
        for array, buffer in zip(arrays, buffers, strict=True)
    ]
    text = json.dumps([sent.document, layout], separators=(",", ":")).encode()
    size = np.array([len(text), zlib.crc32(text)], np.uint64)
    connections.broadcast(source, newcomers, [_bytes_of(size)])
    connections.broadcast(source, newcomers, [memoryview(text)])
    connections.broadcast(source, newcomers, buffers)


def receive(
    connections: PeerConnections,
    source: int,
    newcomers: Sequence[int],
    check: Callable[[dict[str, Any]], None],
) -> TrainingState:
    """Receives what `hand_over` sends; `check` raises an error for a document that does not fit.

    Raises PeerLostError, and DataLossError for data that was changed on its way.
    """
    size = np.zeros(2, np.uint64)
    connections.broadcast(source, newcomers, [_bytes_of(size)])
    text = np.empty(int(size[0]), np.uint8)
    connections.broadcast(source, newcomers, [_bytes_of(text)])
    _check_sum(zlib.crc32(_bytes_of(text)), int(size[1]), "the description of the state")
    document, layout = json.loads(text.tobytes())
    check(document)
    arrays = [np.empty(shape, _dtype(name)) for name, shape, _ in layout]
    buffers = [_bytes_of(array) for array in arrays]
    connections.broadcast(source, newcomers, buffers)
    for place, ((_, _, expected), buffer) in enumerate(zip(layout, buffers, strict=True)):
        _check_sum(zlib.crc32(buffer), expected, f"array {place}")
    return TrainingState(document, arrays)


def _dtype(name: object) -> np.dtype[Any]:
    # NumPy would parse anything else as an expression.
    if not str(name).isidentifier():
        raise DataLossError(f"received an array of dtype {name!r}")
    return np.dtype(str(name))


def _check_sum(found: int, expected: int, name: str) -> None:
    if found != expected:
        raise DataLossError(
            explain(
                f"The CRC-32 of {name} that a member sent is {expected:08x}, but that of what "
                f"arrived is {found:08x}.",
                expected="the bytes that were sent.",
                fix="start this process again, and check the memory and network of both hosts.",
                code="SG506",
            )
        )


def _bytes_of(array: np.ndarray[Any, Any]) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)

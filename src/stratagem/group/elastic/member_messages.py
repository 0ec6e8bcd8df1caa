"""Framed messages over blocking sockets between members of an elastic group."""

from __future__ import annotations

import json
import socket
from typing import Any

from stratagem.group.frames import MAX_FRAME_BYTES, frame


def send_message(connection: socket.socket, message: dict[str, Any], limit_s: float) -> None:
    """Sends a message; raises OSError."""
    connection.settimeout(limit_s)
    connection.sendall(frame(message))


def receive_message(connection: socket.socket, limit_s: float) -> dict[str, Any]:
    """Receives a message; raises OSError, TimeoutError among them."""
    connection.settimeout(limit_s)
    size = int.from_bytes(_receive(connection, 4), "big")
    if size > MAX_FRAME_BYTES:
        raise ConnectionError(f"received a frame of {size} bytes, which is too large")
    try:
        message = json.loads(_receive(connection, size))
    except ValueError as error:
        raise ConnectionError(f"received no message: {error}") from error
    if not isinstance(message, dict):
        raise ConnectionError("received a frame that holds no JSON object")
    return message


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("closed by the other side")
        data += part
    return bytes(data)

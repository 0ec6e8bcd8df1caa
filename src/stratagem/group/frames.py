"""Framed JSON messages between processes that coordinate over asyncio streams.

A frame is a four-byte length and that many bytes of JSON. Nothing is ever unpickled.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

MAX_FRAME_BYTES = 256 * 2**20


def frame(message: dict[str, Any]) -> bytes:
    """Returns a JSON message as a frame."""
    text = json.dumps(message, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "big") + text


async def read_frame(
    reader: asyncio.StreamReader, max_bytes: int = MAX_FRAME_BYTES
) -> dict[str, Any]:
    """Reads one message; raises ConnectionError if the connection or frame is broken."""
    try:
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > max_bytes:
            raise ConnectionError(f"received a frame of {size} bytes, which is too large")
        message = json.loads(await reader.readexactly(size))
    except ConnectionError:
        raise
    except (asyncio.IncompleteReadError, OSError, ValueError, RecursionError) as error:
        raise ConnectionError(f"closed by the other side ({error})") from error
    if not isinstance(message, dict):
        raise ConnectionError("received a frame that holds no JSON object")
    return message

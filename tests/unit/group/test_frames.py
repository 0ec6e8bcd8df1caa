"""Frames of messages, and rejection of invalid ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from stratagem.group.authentication.connections import frame, read_frame


def _read(data: bytes) -> Any:
    async def read() -> Any:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_frame(reader)

    return asyncio.run(read())


def test_frames_are_read_as_they_were_written() -> None:
    assert _read(frame({"kind": "beat", "step": 3})) == {"kind": "beat", "step": 3}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "closed by the other side"),
        (b"\x00\x00\x00\x09{", "closed by the other side"),
        (b"\x00\x00\x00\x03abc", "closed by the other side"),
        (b"\x00\x01\x00\x00" + b"[" * 2**16, "closed by the other side"),
        (b"GET / HTTP/1.1\r\n\r\n", r"received a frame of \d+ bytes, which is too large"),
        (b"\x00\x00\x00\x02[]", "a frame that holds no JSON object"),
    ],
)
def test_invalid_frame_counts_as_a_broken_connection(data, message) -> None:
    with pytest.raises(ConnectionError, match=message):
        _read(data)

"""Connections of JAX's coordination service, led through the group's own port.

JAX ends a process at once, without an error to catch, when its connection to the coordination
service breaks off: nobody could say any more that process 0 has died. So each process connects to
a door of its own, which stays open, and one port is all that process 0 has to be reached at.
"""

from __future__ import annotations

import asyncio

from stratagem.group.wire import frame

__all__ = ["forward", "open_door"]

_CHUNK_BYTES = 2**16
_RETRY_S = 0.05
_START_LIMIT_S = 60.0


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes on what comes, until one of the two sides is gone."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Connects one tunnel to the service on this host, as soon as that listens.

    Args:
        reader: of the tunnel.
        writer: of the tunnel.
        port: of the service.
    """
    async with asyncio.timeout(_START_LIMIT_S):
        while True:
            try:
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(_RETRY_S)
    try:
        ways = [
            asyncio.create_task(_pump(reader, inner_writer)),
            asyncio.create_task(_pump(inner_reader, writer)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    finally:
        inner_writer.close()


async def open_door(host: str, port: int) -> int:
    """Opens a door on this host that leads to the service of process 0.

    What comes in is never closed from this side: when process 0 is gone, it just gets no answer.

    Args:
        host: of process 0.
        port: of its group.

    Returns:
        The port of the door on 127.0.0.1.
    """

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        outer_reader, outer_writer = await asyncio.open_connection(host, port)
        outer_writer.write(frame({"kind": "tunnel"}))
        back = asyncio.create_task(_pump(outer_reader, writer))
        try:
            await _pump(reader, outer_writer)
        except ConnectionError:  # process 0 is gone: what still comes in gets no answer
            while await reader.read(_CHUNK_BYTES):
                pass
        finally:
            back.cancel()
            await asyncio.gather(back, return_exceptions=True)
            outer_writer.close()
            writer.close()

    server = await asyncio.start_server(enter, "127.0.0.1", 0)
    return server.sockets[0].getsockname()[1]

"""Tunnels to JAX's coordination service through the port of the group.

JAX terminates a process, without an error to catch, as soon as its connection to the service
breaks, before anything can report that process 0 died. So each process connects to a local port,
which stays open. Process 0 also needs only one reachable port, which authenticates: the service
itself listens on 127.0.0.1 and has no authentication.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from stratagem.group.authentication.connections import Streams

_CHUNK_BYTES = 2**16
_RETRY_S = 0.05
_START_LIMIT_S = 60.0


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Forwards data until one side closes."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()


async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Connects a tunnel to the service on this host, as soon as it listens."""
    async with asyncio.timeout(_START_LIMIT_S):
        while True:
            try:
                inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
                break
            except OSError:
                await asyncio.sleep(_RETRY_S)
    try:
        directions = [
            asyncio.create_task(_pump(reader, inner_writer)),
            asyncio.create_task(_pump(inner_reader, writer)),
        ]
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)
    finally:
        inner_writer.close()


async def open_coordination_port(connect: Callable[[], Awaitable[Streams]]) -> asyncio.Server:
    """Opens a port on 127.0.0.1 that leads to the service of process 0.

    `connect` makes an authenticated connection to process 0. This side never closes a connection:
    if process 0 is lost, requests get no answer.
    """

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # If process 0 cannot be reached now, JAX's client connects again.
        with contextlib.closing(writer), contextlib.suppress(OSError, ValueError):
            outer_reader, outer_writer = await connect()
            # Closed by `with`, because a group that ends cancels the wait for `back`, too.
            with contextlib.closing(outer_writer):
                back = asyncio.create_task(_pump(outer_reader, writer))
                try:
                    await _pump(reader, outer_writer)
                except OSError:  # process 0 is lost: keep the connection, without answers
                    while await reader.read(_CHUNK_BYTES):
                        pass
                finally:
                    back.cancel()
                    await asyncio.gather(back, return_exceptions=True)

    return await asyncio.start_server(accept, "127.0.0.1", 0)

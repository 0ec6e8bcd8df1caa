"""Notice to the processes that wait for process 0, if it cannot listen for them.

Until it has joined, each process listens for this alone at its own address in the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
from collections.abc import Callable
from typing import Any

from stratagem.group.authentication.connections import close_now, connect, open_streams
from stratagem.group.authentication.listening import listening_sockets
from stratagem.group.authentication.secret import Credentials, Gate, HandshakeLimits
from stratagem.group.current import Identity
from stratagem.group.protocol import frame, read_answer
from stratagem.group.verdict import Verdict

_PURPOSE = "notice"
# Processes that start later than this wait for process 0 until their limit.
_LIMIT_S = 5.0
_RETRY_S = 0.1


async def notify(identity: Identity, credentials: Credentials, verdict: Verdict) -> None:
    """Sends the verdict of process 0 to all others that listen within some seconds."""
    data = frame({"kind": "verdict", **dataclasses.asdict(verdict)})

    async def send(process_id: int) -> None:
        host, port = identity.addresses[process_id]
        while True:
            with contextlib.suppress(OSError):
                _, writer = await connect(
                    host,
                    port,
                    credentials,
                    identity.label,
                    purpose=_PURPOSE,
                    server=identity.labels[process_id],
                    limit_s=_LIMIT_S,
                )
                try:
                    writer.write(data)
                    await writer.drain()
                finally:
                    close_now(writer)
                return
            await asyncio.sleep(_RETRY_S)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LIMIT_S):
            sending = map(send, range(1, len(identity.addresses)))
            await asyncio.gather(*sending, return_exceptions=True)


def listen_for_notice(
    identity: Identity,
    credentials: Credentials,
    on_admitted: Callable[[socket.socket, str], None],
    limits: HandshakeLimits,
) -> Gate | None:
    """Returns the gate of a process that waits for process 0; None if it cannot have one."""
    if not identity.process_id or not identity.addresses:
        return None
    host, port = identity.addresses[identity.process_id]
    try:
        listeners = listening_sockets(host, port, identity.hosts, may_be_everywhere=False)
    except OSError:
        return None
    return Gate(listeners, credentials, on_admitted, purpose=_PURPOSE, limits=limits)


async def read_notice(
    connection: socket.socket, credentials: Credentials, identity: Identity, limit_s: float
) -> dict[str, Any] | None:
    """Returns the verdict that a connection brings, or None."""
    with contextlib.suppress(OSError):
        async with asyncio.timeout(limit_s):
            reader, writer = await open_streams(connection, credentials, is_server=True)
            try:
                message = await read_answer(reader, identity.num_processes)
            finally:
                close_now(writer)
        if message["kind"] == "verdict":
            return message
    return None

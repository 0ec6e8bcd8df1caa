"""Measurements of one connection: reachability, round trips, the other clock, and bandwidth."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import socket
import statistics
import time
from collections.abc import AsyncGenerator

from stratagem.group.protocol import frame, read_frame

_CHUNK_BYTES = 2**18
# A connection reaches its speed in this time; it is not measured.
_RISE_S = 0.1
_BUFFER_BYTES = 2**22
# A host that is silent for 10 s is asked six times, every 5 s.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 6}


class Reason(enum.StrEnum):
    """Outcome of a connection attempt."""

    REACHED = "reached"
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNKNOWN_NAME = "unknown name"
    NO_ROUTE = "no route"
    FOREIGN_ADDRESS = "foreign address"
    WRONG_HOST = "another host answers"
    SILENT = "another program answers"
    ERROR = "error"


async def attempt(
    address: str, port: int, limit_s: float, expected: int | None = None
) -> tuple[Reason, str]:
    """Tries to connect; returns the outcome, and the numeric address that was tried.

    Args:
        address: host name or address.
        port: port.
        limit_s: seconds for each of: the lookup of the name, the connection, the answer.
        expected: index of the agent that should answer; None if a connection is enough.
    """
    loop = asyncio.get_running_loop()
    try:
        places = await asyncio.wait_for(
            loop.getaddrinfo(address, port, type=socket.SOCK_STREAM), limit_s
        )
    except (socket.gaierror, TimeoutError):
        return Reason.UNKNOWN_NAME, ""
    first: tuple[Reason, str] | None = None
    for place in dict.fromkeys(str(place[0]) for *_, place in places):
        reason = await _attempt_at(place, port, limit_s, expected)
        if reason is Reason.REACHED:
            return reason, place
        first = first or (reason, place)
    return first or (Reason.UNKNOWN_NAME, "")


async def measure_echo(address: str, port: int, limit_s: float, count: int) -> dict[str, float]:
    """Returns the median round trip, and the offset of the other clock with its uncertainty.

    The other clock is read between request and answer. Its offset is taken from the fastest round
    trip, as in NTP: the midpoint is wrong by at most half of that.
    """
    trips: list[tuple[float, float]] = []
    async with _connected(address, port, limit_s) as (reader, writer):
        for _ in range(count):
            begin, sent_s = time.perf_counter(), time.time()
            writer.write(frame({"kind": "echo"}))
            answer = await asyncio.wait_for(read_frame(reader), limit_s)
            trip_s = time.perf_counter() - begin
            trips.append((trip_s, float(answer["time_s"]) - (sent_s + trip_s / 2)))
    fastest_s, offset_s = min(trips)
    return {
        "round_trip_s": statistics.median(trip_s for trip_s, _ in trips),
        "offset_s": offset_s,
        "uncertainty_s": fastest_s / 2,
    }


async def measure_transfer(
    address: str, port: int, limit_s: float, duration_s: float
) -> dict[str, float]:
    """Sends zeros over one connection; returns the bytes per second that arrived."""
    async with _connected(address, port, limit_s) as (reader, writer):
        writer.write(frame({"kind": "receive", "duration_s": duration_s}))
        feeder = asyncio.create_task(_feed(writer))
        try:
            limit_s += _RISE_S + duration_s
            answer = await asyncio.wait_for(read_frame(reader), limit_s)
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            writer.transport.abort()  # drops what is still buffered
    return {"bytes_per_s": float(answer["bytes_per_s"])}


def answer_echo(index: int) -> bytes:
    """Returns the answer to an echo: index and clock of this host."""
    return frame({"kind": "echo", "index": index, "time_s": time.time()})


async def receive(reader: asyncio.StreamReader, duration_s: float) -> bytes:
    """Receives until the time is over; returns the answer with the speed."""
    await reader.read(_CHUNK_BYTES)
    begin_s, num_bytes, elapsed_s = time.perf_counter(), 0, 0.0
    counted_from_s = _RISE_S
    while elapsed_s < _RISE_S + duration_s and (data := await reader.read(_BUFFER_BYTES)):
        elapsed_s = time.perf_counter() - begin_s
        if elapsed_s <= _RISE_S:
            counted_from_s = elapsed_s
        else:
            num_bytes += len(data)
    rate = num_bytes / (elapsed_s - counted_from_s) if elapsed_s > counted_from_s else 0.0
    return frame({"kind": "received", "bytes_per_s": rate})


def detect_loss(writer: asyncio.StreamWriter) -> None:
    """Makes a connection that waits without a limit end if the other host is gone."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def close_writer(writer: asyncio.StreamWriter) -> None:
    """Closes a connection, whatever state it is in."""
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _attempt_at(address: str, port: int, limit_s: float, expected: int | None) -> Reason:
    try:
        async with _connected(address, port, limit_s) as (reader, writer):
            if expected is None:
                return Reason.REACHED
            return await _identify(reader, writer, limit_s, expected)
    except TimeoutError:
        return Reason.TIMEOUT
    except ConnectionRefusedError:
        return Reason.REFUSED
    except OSError as error:
        is_lost = error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES)
        return Reason.NO_ROUTE if is_lost else Reason.ERROR


async def _identify(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit_s: float, expected: int
) -> Reason:
    try:
        writer.write(frame({"kind": "echo"}))
        answer = await asyncio.wait_for(read_frame(reader), limit_s)
    except OSError:  # includes TimeoutError
        return Reason.SILENT
    if "index" not in answer:
        return Reason.SILENT
    return Reason.REACHED if answer["index"] == expected else Reason.WRONG_HOST


@contextlib.asynccontextmanager
async def _connected(
    address: str, port: int, limit_s: float
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), limit_s)
    try:
        yield reader, writer
    finally:
        await close_writer(writer)


async def _feed(writer: asyncio.StreamWriter) -> None:
    chunk = bytes(_CHUNK_BYTES)
    while True:
        writer.write(chunk)
        await writer.drain()

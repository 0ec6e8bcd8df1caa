"""Agent of one host: measures connections, answers the probes of others, carries out orders."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import socket
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

from stratagem.cli.doctor.network.survey import SurveyedHost
from stratagem.group.authentication.connections import frame, read_frame

# Measurements of one connection: reachability, round trips, the other clock, and bandwidth.


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


# Agent of one host: answers the probes of others, and carries out the leader's orders.


_NUM_ECHOES = 20
_MAX_TRANSFER_S = 10.0
_BACKLOG = 128
# Larger than asyncio's 64 KiB, which limits the speed of a transfer.
_STREAM_BYTES = 2**22
# It may name thousands of hosts. Any program can send one.
_MAX_MESSAGE_BYTES = 2**20

Send = Callable[[dict[str, Any]], Awaitable[None]]
JoinHandler = Callable[[dict[str, Any], asyncio.StreamReader, asyncio.StreamWriter], None]


class Agent:
    """Agent of one host.

    Args:
        hosts: all hosts, in the same order everywhere.
        index: index of this one.
        limit_s: seconds to wait for a connection or an answer of another host.
        gather_facts: called for the facts about this machine, in a thread.
        on_join: called with the first message of an agent that joins this one, the leader.
    """

    def __init__(
        self,
        hosts: Sequence[SurveyedHost],
        index: int,
        limit_s: float,
        gather_facts: Callable[[], Mapping[str, Any]],
        on_join: JoinHandler | None = None,
    ) -> None:
        self.index = index
        self.free_port = 0
        self.has_cluster_port = False
        self._hosts = hosts
        self._limit_s = limit_s
        self._gather_facts = gather_facts
        self._on_join = on_join
        self._servers: list[asyncio.Server] = []
        self._connections = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Listens on a free port, and on the port of the cluster if it can."""
        free = listen("", 0)
        self.free_port = free.getsockname()[1]
        sockets = [free]
        own = self._hosts[self.index]
        if own.port is not None:
            listener = _listen_for_task(own.address, own.port)
            self.has_cluster_port = listener is not None
            sockets += [] if listener is None else [listener]
        for listener in sockets:
            self._servers.append(
                await asyncio.start_server(self._serve, sock=listener, limit=_STREAM_BYTES)
            )

    async def close(self) -> None:
        """Stops listening, and closes all connections."""
        for server in self._servers:
            server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def obey(self, reader: asyncio.StreamReader, send: Send) -> dict[str, Any] | None:
        """Carries out orders; returns the final one, or None if the leader is gone."""
        with contextlib.suppress(OSError):
            while (order := await read_frame(reader))["kind"] != "end":
                await send(await self.carry_out(order))
            return order
        return None

    async def carry_out(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to an order; an error of the network is one, too."""
        orders = {
            "facts": self._facts,
            "reach": self._reach,
            "owns": self._owns,
            "echo": self._echo,
            "transfer": self._transfer,
        }
        try:
            return await orders[order["kind"]](order)
        except TimeoutError:
            return {"error": f"no answer within {self._limit_s:g} s"}
        except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            return {"error": f"{type(error).__name__}: {error}"}

    async def _facts(self, order: Mapping[str, Any]) -> dict[str, Any]:
        del order
        return {"facts": dict(await asyncio.to_thread(self._gather_facts))}

    async def _owns(self, order: Mapping[str, Any]) -> dict[str, Any]:
        owns = {place: _is_own(place) for place in order["places"]}
        return {"owns": owns, "own_address": _resolved(self._hosts[self.index].address)}

    async def _echo(self, order: Mapping[str, Any]) -> dict[str, Any]:
        address = self._hosts[order["to"]].address
        return await measure_echo(address, order["port"], self._limit_s, _NUM_ECHOES)

    async def _transfer(self, order: Mapping[str, Any]) -> dict[str, Any]:
        address = self._hosts[order["to"]].address
        return await measure_transfer(address, order["port"], self._limit_s, order["duration_s"])

    async def _reach(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Tries all other hosts at once, each on its cluster's port and on its free port."""

        async def try_both(to: int) -> list[Any]:
            host, free = self._hosts[to], order["ports"][to]
            if to == self.index:
                return [None, None]
            # Without an agent there, a refused connection still shows that the host answers.
            expected = to if free is not None else None
            return await asyncio.gather(
                *(
                    _nothing() if port is None else attempt(*place, self._limit_s, expected)
                    for port in (host.port, free)
                    for place in [(host.address, port or 0)]
                )
            )

        tried = await asyncio.gather(*map(try_both, range(len(self._hosts))))
        return {"reach": {"cluster": [one for one, _ in tried], "free": [one for _, one in tried]}}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            while True:
                message = await read_frame(reader, _MAX_MESSAGE_BYTES)
                if message.get("kind") == "join" and self._on_join is not None:
                    self._on_join(message, reader, writer)
                    return
                if message.get("kind") == "receive":
                    duration_s = min(float(message["duration_s"]), _MAX_TRANSFER_S)
                    writer.write(await receive(reader, duration_s))
                    while await reader.read(_STREAM_BYTES):
                        continue  # until it has the answer: closing now would discard that
                    break
                writer.write(answer_echo(self.index))
                await writer.drain()
        except (OSError, KeyError, TypeError, ValueError, asyncio.CancelledError):
            pass  # no agent, or one that has ended
        await close_writer(writer)


def listen(address: str, port: int) -> socket.socket:
    """Returns a listening socket; with an empty address, on all interfaces. Raises OSError."""
    if not address:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be disabled
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
                )
        return socket.create_server(("", port), backlog=_BACKLOG)
    family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((str(place[0]), port), family=family, backlog=_BACKLOG)


def _listen_for_task(address: str, port: int) -> socket.socket | None:
    """Listens on all interfaces, else at the address of the task."""
    for place in ("", address):
        with contextlib.suppress(OSError):  # reported by the facts
            return listen(place, port)
    return None


def _resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _is_own(place: str) -> bool:
    """Returns True if an address belongs to an interface of this machine."""
    try:
        listen(place, 0).close()
    except OSError:
        return False
    return True


async def _nothing() -> None:
    return None

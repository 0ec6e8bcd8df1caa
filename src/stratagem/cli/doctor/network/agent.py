"""Agent of one host: answers the probes of others, and carries out the leader's orders."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from stratagem.cli.doctor.network.probes import (
    answer_echo,
    attempt,
    close_writer,
    measure_echo,
    measure_transfer,
    receive,
)
from stratagem.cli.doctor.network.survey import SurveyedHost
from stratagem.group.protocol import read_frame

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

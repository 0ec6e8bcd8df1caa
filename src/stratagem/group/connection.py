"""Background thread that connects a process to its group and, on process 0, runs the hub."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.cluster.addresses import free_ports, is_every_interface
from stratagem.errors import invalid
from stratagem.group.authentication.connections import (
    Streams,
    UnansweredError,
    close_now,
    connect,
    frame,
    listening_sockets,
    open_coordination_port,
    open_streams,
    read_answer,
)
from stratagem.group.authentication.secret import Credentials, Gate, HandshakeLimits
from stratagem.group.current import Identity
from stratagem.group.hub import MEMBER, TUNNEL, Hub
from stratagem.group.verdict import GroupLimits, ProgramPosition, Verdict
from stratagem.observe.writer import restart_count

# Notice to the processes that wait for process 0, if it cannot listen for them.
#
# Until it has joined, each process listens for this alone at its own address in the cluster.


_NOTICE_PURPOSE = "notice"
# Processes that start later than this wait for process 0 until their limit.
_NOTICE_LIMIT_S = 5.0
_NOTICE_RETRY_S = 0.1


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
                    purpose=_NOTICE_PURPOSE,
                    server=identity.labels[process_id],
                    limit_s=_NOTICE_LIMIT_S,
                )
                try:
                    writer.write(data)
                    await writer.drain()
                finally:
                    close_now(writer)
                return
            await asyncio.sleep(_NOTICE_RETRY_S)

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_NOTICE_LIMIT_S):
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
    return Gate(listeners, credentials, on_admitted, purpose=_NOTICE_PURPOSE, limits=limits)


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


# Background thread that connects a process to its group and, on process 0, runs the hub.


_PURPOSE = "group"
_RETRY_S = 0.2
_CLOSE_LIMIT_S = 10.0


class Connection:
    """Connects to process 0 in a background thread, which calls all callbacks.

    `position` is called at each heartbeat, `on_message` with each message, `on_lost` with a
    description when process 0 is lost, `on_error` with an error that prevents joining.
    """

    def __init__(
        self,
        identity: Identity,
        limits: GroupLimits,
        credentials: Credentials,
        *,
        position: Callable[[], ProgramPosition],
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._credentials = credentials
        self._handshakes = HandshakeLimits.find()
        self._host = identity.host
        self._position = position
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_error = on_error
        self._service_port = free_ports(1)[0] if identity.process_id == 0 else 0
        self._received_at = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._hub: Hub | None = None
        self._gate: Gate | None = None
        self._notice_gate: Gate | None = None
        self._door: asyncio.Server | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stratagem-group", daemon=True)

    def start(self) -> None:
        """Starts connecting."""
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a JSON message from any thread, without waiting."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the group with it
            self._loop.call_soon_threadsafe(self._write, message)

    def open_coordination_port(self) -> int:
        """Returns the port on 127.0.0.1 for JAX's coordination service."""
        if self._identity.process_id == 0:
            return self._service_port
        opening = open_coordination_port(lambda: self._reach(TUNNEL))
        self._door = asyncio.run_coroutine_threadsafe(opening, self._loop).result(_CLOSE_LIMIT_S)
        return self._door.sockets[0].getsockname()[1]

    def drain(self, limit_s: float) -> None:
        """Waits until sent messages are written, at most `limit_s` seconds."""

        async def flush() -> None:
            if self._writer is not None:
                await self._writer.drain()

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(flush(), self._loop).result(limit_s)

    def wait_until_all_notified(self, limit_s: float) -> None:
        """On process 0, waits until all processes have received the verdict."""
        if self._hub is not None:
            notifying = asyncio.run_coroutine_threadsafe(
                self._hub.wait_until_all_notified(), self._loop
            )
            with contextlib.suppress(TimeoutError):
                notifying.result(limit_s)

    def abandon(self) -> None:
        """Closes the connection without notice."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        connection = self._loop.create_task(self._run_connection())
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._close(connection))
            self._loop.close()

    async def _close(self, connection: asyncio.Task[None]) -> None:
        for gate in (self._gate, self._notice_gate):
            if gate is not None:
                gate.close()
        if self._door is not None:
            self._door.close()
        if self._hub is not None:
            self._hub.close()
        if self._writer is not None:
            close_now(self._writer)
        connection.cancel()
        # A connection that was accepted last begins a task meanwhile.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(connection, return_exceptions=True)
        for _ in range(2):  # let the transports close, and those below TLS
            await asyncio.sleep(0)

    async def _run_connection(self) -> None:
        try:
            self._notice_gate = listen_for_notice(
                self._identity, self._credentials, self._take_notice, self._handshakes
            )
            if self._identity.process_id == 0:
                await self._start_hub()
            while await self._follow(await self._connect()):
                await asyncio.sleep(_RETRY_S)
        except Exception as error:  # noqa: BLE001 - the joining thread raises it
            self._on_error(error)

    async def _follow(self, reader: asyncio.StreamReader) -> bool:
        """Receives until the connection ends; True if process 0 is that of the start before.

        Nothing beats between two connections: process 0 may take longer than its limit to return.
        """
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                message = await read_answer(reader, self._identity.num_processes)
                self._received_at = time.monotonic()
                self._on_message(message)
                if message["kind"] == "busy":
                    return True
        except ConnectionError:
            self._on_lost("died: its connection closed")
            return False
        finally:
            beating.cancel()

    async def _start_hub(self) -> None:
        identity = self._identity
        try:
            listeners = listening_sockets(identity.host, identity.port, identity.hosts)
        except OSError as error:
            failure = invalid(
                f"{identity.label} cannot listen on port {identity.port}: "
                f"{error.strerror or error}.",
                expected="a free port on the host of process 0.",
                fix="choose another port in the cluster, or stop the program that uses it, "
                "such as an earlier run.",
                code="SG509",
            )
            await notify(identity, self._credentials, Verdict("ValueError", str(failure)))
            raise failure from error
        address = listeners[0].getsockname()[0]
        self._host = "127.0.0.1" if is_every_interface(address) else address
        hub = Hub(
            list(identity.labels),
            self._limits,
            self._service_port,
            self._credentials,
            self._handshakes.timeout_s,
        )
        hub.start()
        self._hub = hub
        self._gate = Gate(
            listeners, self._credentials, self._admit, purpose=_PURPOSE, limits=self._handshakes
        )

    def _admit(self, connection: socket.socket, claim: str) -> None:
        assert self._hub is not None
        try:
            self._loop.call_soon_threadsafe(self._hub.serve, connection, claim)
        except RuntimeError:  # the loop has ended, and the group with it
            connection.close()

    def _take_notice(self, connection: socket.socket, claim: str) -> None:
        del claim  # it names process 0

        async def take() -> None:
            limit_s = self._handshakes.timeout_s
            notice = await read_notice(connection, self._credentials, self._identity, limit_s)
            if notice is not None:
                self._on_message(notice)

        asyncio.run_coroutine_threadsafe(take(), self._loop)

    async def _reach(self, role: str) -> Streams:
        return await connect(
            self._host,
            self._identity.port,
            self._credentials,
            f"{role} {self._identity.process_id}",
            purpose=_PURPOSE,
            server=self._identity.labels[0],
            limit_s=self._handshakes.timeout_s,
        )

    async def _connect(self) -> asyncio.StreamReader:
        unanswered_since = None
        while True:
            try:
                reader, writer = await self._reach(MEMBER)
                break
            except UnansweredError as error:
                unanswered_since = unanswered_since or time.monotonic()
                if time.monotonic() - unanswered_since > self._limits.peer_s:
                    raise self._unanswered(error) from error
            except OSError:
                unanswered_since = None
            await asyncio.sleep(_RETRY_S)
        if self._notice_gate is not None:
            self._notice_gate.close()
        if self._writer is not None:
            close_now(self._writer)
        self._writer = writer
        facts = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "address": writer.get_extra_info("sockname")[0],
            "same": self._identity.same,
        }
        self._write(
            {
                "kind": "hello",
                "process_id": self._identity.process_id,
                "num_processes": self._identity.num_processes,
                "restart": restart_count(),
                "facts": facts,
            }
        )
        self._received_at = time.monotonic()
        return reader

    def _unanswered(self, error: UnansweredError) -> ValueError:
        return invalid(
            f"Port {self._identity.port} of {self._identity.labels[0]} accepts connections, "
            f"but does not answer {self._identity.label}: {error}.",
            expected="process 0 of this run at its address, which answers within "
            f"{self._limits.peer_s:g} s (STRATAGEM_PEER_TIMEOUT_S).",
            fix="check whether another program has taken the port, or a proxy is between the two.",
            code="SG509",
        )

    async def _beat(self) -> None:
        interval_s = min(1.0, self._limits.peer_s / 5)
        while True:
            position = dataclasses.asdict(self._position())
            beat = {**position, "kind": "beat", "position": position["kind"].value}
            # After what the program has sent before it came there.
            self._loop.call_soon(self._write, beat)
            await asyncio.sleep(interval_s)
            silent_s = time.monotonic() - self._received_at
            if silent_s > self._limits.peer_s:
                self._on_lost(f"has not answered for {silent_s:.0f} s")

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

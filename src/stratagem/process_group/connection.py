"""Background thread that connects a process to its group and, on process 0, runs the hub."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.frames import frame, read_frame
from stratagem.messages import explain
from stratagem.process_group.hub import Hub
from stratagem.process_group.identity import Identity
from stratagem.process_group.tunnel import open_coordination_port
from stratagem.process_group.verdict import GroupLimits, ProgramPosition

__all__ = ["Connection"]

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
        *,
        position: Callable[[], ProgramPosition],
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._position = position
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_error = on_error
        self._service_port = _free_port() if identity.process_id == 0 else 0
        self._received_at = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._hub: Hub | None = None
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
        opening = open_coordination_port(self._identity.host, self._identity.port)
        return asyncio.run_coroutine_threadsafe(opening, self._loop).result(_CLOSE_LIMIT_S)

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
        if self._hub is not None:
            self._hub.close()
        if self._writer is not None:
            self._writer.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in [connection, *tasks]:
            task.cancel()
        await asyncio.gather(connection, *tasks, return_exceptions=True)
        await asyncio.sleep(0)  # let the transports close

    async def _run_connection(self) -> None:
        try:
            if self._identity.process_id == 0:
                await self._start_hub()
            reader = await self._connect()
        except Exception as error:  # noqa: BLE001 - the joining thread raises it
            self._on_error(error)
            return
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                message = await read_frame(reader)
                self._received_at = time.monotonic()
                self._on_message(message)
        except ConnectionError:
            self._on_lost("died: its connection closed")
        finally:
            beating.cancel()

    async def _start_hub(self) -> None:
        hub = Hub(list(self._identity.labels), self._limits, self._service_port)
        try:
            await hub.start(self._identity.port)
        except OSError as error:
            raise ValueError(
                explain(
                    f"{self._identity.label} cannot listen on port {self._identity.port}: "
                    f"{error.strerror or error}.",
                    expected="a free port on the host of process 0.",
                    fix="choose another port in the cluster, or stop the program that uses it, "
                    "such as an earlier run.",
                    code="SG509",
                )
            ) from error
        self._hub = hub

    async def _connect(self) -> asyncio.StreamReader:
        host = "127.0.0.1" if self._identity.process_id == 0 else self._identity.host
        while True:
            try:
                reader, writer = await asyncio.open_connection(host, self._identity.port)
                break
            except OSError:
                await asyncio.sleep(_RETRY_S)
        self._writer = writer
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
                "facts": facts,
            }
        )
        self._received_at = time.monotonic()
        return reader

    async def _beat(self) -> None:
        interval_s = min(1.0, self._limits.peer_s / 5)
        while True:
            position = self._position()
            self._write(
                {
                    "kind": "beat",
                    "position": position.kind.value,
                    "name": position.name,
                    "step": position.step,
                    "moves": position.moves,
                }
            )
            await asyncio.sleep(interval_s)
            silent_s = time.monotonic() - self._received_at
            if silent_s > self._limits.peer_s:
                self._on_lost(f"has not answered for {silent_s:.0f} s")

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""The thread that connects a process to its group: it speaks and listens; on process 0 it rules."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from stratagem.group.hub import Hub
from stratagem.group.identity import Identity
from stratagem.group.tunnel import open_door
from stratagem.group.verdict import Limits, Place
from stratagem.group.wire import frame, read_frame
from stratagem.messages import explain

__all__ = ["Connection"]

_RETRY_S = 0.2
_CLOSE_LIMIT_S = 10.0


class Connection:
    """Connects to process 0 in a thread of its own.

    Args:
        identity: which member this process is.
        limits: how long anything may take.
        place: asked where the program is, once a beat.
        on_message: called with each message, in the thread of the connection.
        on_lost: called with what happened to process 0, in that thread.
        on_error: called with an error that keeps this process from connecting.
    """

    def __init__(
        self,
        identity: Identity,
        limits: Limits,
        *,
        place: Callable[[], Place],
        on_message: Callable[[dict[str, Any]], None],
        on_lost: Callable[[str], None],
        on_error: Callable[[Exception], None],
    ) -> None:
        self._identity = identity
        self._limits = limits
        self._ask_place = place
        self._on_message = on_message
        self._on_lost = on_lost
        self._on_error = on_error
        self._service_port = _free_port() if identity.process_id == 0 else 0
        self._heard_at = time.monotonic()
        self._writer: asyncio.StreamWriter | None = None
        self._hub: Hub | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stratagem-group", daemon=True)

    def start(self) -> None:
        """Begins to connect."""
        self._thread.start()

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message, from any thread, without waiting.

        Args:
            message: of what JSON can hold.
        """
        with contextlib.suppress(RuntimeError):  # the loop has ended: so has everything
            self._loop.call_soon_threadsafe(self._write, message)

    def open_door(self) -> int:
        """Opens a way to JAX's coordination service.

        Returns:
            A port on 127.0.0.1; on process 0, where the service has to listen.
        """
        if self._identity.process_id == 0:
            return self._service_port
        opening = open_door(self._identity.host, self._identity.port)
        return asyncio.run_coroutine_threadsafe(opening, self._loop).result(_CLOSE_LIMIT_S)

    def drain(self, limit_s: float) -> None:
        """Waits until what was sent has gone out.

        Args:
            limit_s: how long at most.
        """

        async def flush() -> None:
            if self._writer is not None:
                await self._writer.drain()

        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(flush(), self._loop).result(limit_s)

    def tell_everybody(self, limit_s: float) -> None:
        """On process 0, waits until all have heard why the group ended.

        Args:
            limit_s: how long at most.
        """
        if self._hub is not None:
            telling = asyncio.run_coroutine_threadsafe(self._hub.tell_everybody(), self._loop)
            with contextlib.suppress(TimeoutError):
                telling.result(limit_s)

    def abandon(self) -> None:
        """Closes without a word."""
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        living = self._loop.create_task(self._live())
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._close(living))
            self._loop.close()

    async def _close(self, living: asyncio.Task[None]) -> None:
        if self._hub is not None:
            self._hub.close()
        if self._writer is not None:
            self._writer.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in [living, *tasks]:
            task.cancel()
        await asyncio.gather(living, *tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what is closing closes

    async def _live(self) -> None:
        try:
            if self._identity.process_id == 0:
                await self._listen()
            reader = await self._connect()
        except Exception as error:  # noqa: BLE001 - raised by the thread that joins
            self._on_error(error)
            return
        beating = asyncio.create_task(self._beat())
        try:
            while True:
                message = await read_frame(reader)
                self._heard_at = time.monotonic()
                self._on_message(message)
        except ConnectionError:
            self._on_lost("died: its connection broke off")
        finally:
            beating.cancel()

    async def _listen(self) -> None:
        hub = Hub(list(self._identity.labels), self._limits, self._service_port)
        try:
            await hub.start(self._identity.port)
        except OSError as error:
            raise ValueError(
                explain(
                    f"{self._identity.label} cannot listen on port {self._identity.port}: "
                    f"{error.strerror or error}.",
                    expected="a free port on the host of process 0.",
                    fix="choose another port in the cluster, or end what uses it (a former run?).",
                )
            ) from error
        self._hub = hub  # referred to for as long as the group is

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
        self._heard_at = time.monotonic()
        return reader

    async def _beat(self) -> None:
        interval_s = min(1.0, self._limits.peer_s / 5)
        while True:
            place = self._ask_place()
            self._write(
                {
                    "kind": "beat",
                    "place": place.kind.value,
                    "name": place.name,
                    "step": place.step,
                    "moves": place.moves,
                }
            )
            await asyncio.sleep(interval_s)
            silent_s = time.monotonic() - self._heard_at
            if silent_s > self._limits.peer_s:
                self._on_lost(f"has not answered for {silent_s:.0f} s")

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

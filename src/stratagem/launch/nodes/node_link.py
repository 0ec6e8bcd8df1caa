"""Connection of a node to the rendezvous on node 0."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import threading
import time
from typing import Any

from stratagem.closing import Closing
from stratagem.group.authentication.connections import connect
from stratagem.group.authentication.credentials import Credentials
from stratagem.group.frames import frame, read_frame
from stratagem.launch.nodes.meeting_point import MeetingPoint
from stratagem.launch.nodes.rendezvous import LIMIT_OPTION, PURPOSE, beat_s

_RETRY_S = 0.3
_CONNECT_S = 5.0
_CLOSE_S = 2.0


class NodeLink(Closing):
    """One connection, in a background thread: connects, greets, and exchanges heartbeats.

    `hello` is the greeting without the own address. The last of the `messages` is `lost` (with a
    `reason`), `refused` (with a `text`) or, if node 0 could not be reached within `join_s`,
    `absent`.
    """

    def __init__(
        self,
        point: MeetingPoint,
        hello: dict[str, Any],
        credentials: Credentials | None = None,
        *,
        timeout_s: float,
        join_s: float,
    ) -> None:
        self._point = point
        self._credentials = credentials or Credentials()
        self._hello = hello
        self._timeout_s = timeout_s
        self._join_s = join_s
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._writer: asyncio.StreamWriter | None = None
        self._loop = asyncio.new_event_loop()
        self._main = self._loop.create_task(self._run())
        self._thread = threading.Thread(target=self._run_loop, name="stratagem-node", daemon=True)
        self._thread.start()

    def take(self, wait_s: float) -> dict[str, Any] | None:
        """Returns the next message; None if there is none for `wait_s` seconds."""
        with contextlib.suppress(queue.Empty):
            return self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait()
        return None

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message without waiting; it is dropped if the connection is closed."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._write, message)

    def close(self) -> None:
        """Closes the connection when sent messages are written."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join(_CLOSE_S)

    def _run_loop(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._main)
        self._loop.close()

    async def _run(self) -> None:
        reader = await self._connect()
        if reader is None:
            return
        beating = self._loop.create_task(self._beat())
        try:
            while True:
                async with asyncio.timeout(self._timeout_s):
                    message = await read_frame(reader)
                if message.get("kind") != "beat":
                    self._messages.put(message)
        except TimeoutError:
            self._lost(f"no answer from node 0 for {self._timeout_s:g} s, {LIMIT_OPTION}")
        except OSError:
            self._lost("node 0 closed the connection; its launcher ended or was killed")
        finally:
            beating.cancel()
            if self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.close()
                    async with asyncio.timeout(_CLOSE_S):
                        await self._writer.wait_closed()

    async def _connect(self) -> asyncio.StreamReader | None:
        deadline_s = time.monotonic() + self._join_s
        while True:
            try:
                reader, writer = await connect(
                    self._point.host,
                    self._point.port,
                    self._credentials,
                    "node",
                    purpose=PURPOSE,
                    server=f"node 0 ({self._point.address})",
                    limit_s=_CONNECT_S,
                )
                break
            except ValueError as error:
                self._messages.put({"kind": "refused", "text": str(error), "is_final": True})
                return None
            except OSError as error:
                if time.monotonic() > deadline_s:
                    reason = str(error) or "no answer"
                    self._messages.put({"kind": "absent", "reason": reason})
                    return None
            await asyncio.sleep(_RETRY_S)
        self._writer = writer
        address = writer.get_extra_info("sockname")[0]
        own = {"host": socket.gethostname(), "pid": os.getpid(), "address": address}
        self._write({"kind": "hello", **own, **self._hello})
        return reader

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(beat_s(self._timeout_s))
            self._write({"kind": "beat"})

    def _write(self, message: dict[str, Any]) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message))

    def _lost(self, reason: str) -> None:
        self._messages.put({"kind": "lost", "reason": reason})

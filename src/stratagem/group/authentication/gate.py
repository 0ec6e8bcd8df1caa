"""Listener that lets only holders of the secret in, in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Sequence

from stratagem import environment
from stratagem.closing import Closing
from stratagem.group.authentication.credentials import Credentials
from stratagem.group.authentication.handshake import admit

# After a handshake was cut short to make room: bounds the CPU time that a flood takes.
_PAUSE_S = 0.01
_CLOSE_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandshakeLimits:
    """Limits on connections that have not proved the secret yet: of a port, and of an address."""

    timeout_s: float = 10.0
    total: int = 256
    per_address: int = 64

    @staticmethod
    def find() -> HandshakeLimits:
        """Returns those of the settings."""
        return HandshakeLimits(
            timeout_s=environment.read("handshake_timeout_s"),
            total=environment.read("max_handshakes"),
            per_address=environment.read("max_handshakes_per_address"),
        )


class Gate(Closing):
    """Accepts connections and hands over those that prove the secret.

    `on_admitted` is called in the gate's thread with a socket that is not blocking, and with the
    claim of its client. Beyond the limits the oldest handshake is cut short, so that idle
    connections do not keep members out. Closing it closes the listeners.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        credentials: Credentials,
        on_admitted: Callable[[socket.socket, str], None],
        *,
        purpose: str,
        limits: HandshakeLimits | None = None,
    ) -> None:
        self._listeners = listeners
        self._key = credentials.key(purpose)
        self._mode = credentials.mode
        self._on_admitted = on_admitted
        self._limits = limits or HandshakeLimits.find()
        self._handshakes: dict[asyncio.Task[str | None], str] = {}  # the oldest first
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stratagem-gate", daemon=True)
        self._thread.start()

    @property
    def num_handshakes(self) -> int:
        """Number of connections that have not proved the secret yet."""
        return len(self._handshakes)

    def close(self) -> None:
        """Stops listening, and closes connections that were not handed over."""
        if not self._is_closing:  # a second stop would interrupt the end of handshakes
            self._is_closing = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        for one in self._listeners:
            one.settimeout(0)
            self._listen(one)
        try:
            self._loop.run_forever()
        finally:
            for listener in self._listeners:
                self._loop.remove_reader(listener)
                listener.close()
            self._loop.run_until_complete(self._cut_short())
            self._loop.close()

    def _listen(self, listener: socket.socket) -> None:
        if not self._is_closing:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts a connection. A coroutine that is cancelled might lose it unclosed."""
        try:
            connection, address = listener.accept()
        except BlockingIOError:  # the client has gone
            return
        except OSError:  # no descriptor is free, or the connection has ended already
            self._make_room(listener, next(iter(self._handshakes), None))
            return
        connection.settimeout(0)
        task = self._loop.create_task(self._shake_hands(connection))
        self._handshakes[task] = str(address[0])
        task.add_done_callback(functools.partial(self._finish, connection))
        if (oldest := self._excess(str(address[0]))) is not None:
            self._make_room(listener, oldest)

    def _excess(self, address: str) -> asyncio.Task[str | None] | None:
        """Returns the handshake to cut short, if there are too many."""
        limits, of_address = self._limits, Counter(self._handshakes.values())[address]
        if of_address > limits.per_address:
            return next(task for task, one in self._handshakes.items() if one == address)
        return next(iter(self._handshakes)) if len(self._handshakes) > limits.total else None

    def _make_room(self, listener: socket.socket, oldest: asyncio.Task[str | None] | None) -> None:
        if oldest is not None:
            oldest.cancel()
        self._loop.remove_reader(listener)
        self._loop.call_later(_PAUSE_S, self._listen, listener)

    async def _cut_short(self) -> None:
        """Ends all handshakes."""
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _shake_hands(self, connection: socket.socket) -> str | None:
        with contextlib.suppress(OSError):  # a stranger, or a member that connects again
            async with asyncio.timeout(self._limits.timeout_s):
                return await admit(connection, self._key, self._mode)
        return None

    def _finish(self, connection: socket.socket, task: asyncio.Task[str | None]) -> None:
        """Hands a connection over, or closes it; a task may be cancelled before it starts."""
        del self._handshakes[task]
        claim = None if task.cancelled() else task.result()
        if claim is None:
            connection.close()
        else:
            self._on_admitted(connection, claim)

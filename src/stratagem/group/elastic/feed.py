"""Messages to members that are late, sent by a thread: the others do not wait for their reading."""

from __future__ import annotations

import collections
import select
import socket
import threading
import time
from collections.abc import Iterable, Mapping

_POLL_MS = 50


class Feed:
    """Sends messages to members over their connections, to each in order.

    Nothing else may be sent to a member while `is_busy`. A broken connection drops the messages for
    it: the member's own view is broken then.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = sockets
        self._pending: dict[int, collections.deque[memoryview]] = {}
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def send(self, peers: Iterable[int], message: bytes) -> None:
        """Queues a message for several members; starts the thread if there is none."""
        with self._changed:
            for peer in peers:
                self._pending.setdefault(peer, collections.deque()).append(memoryview(message))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="stratagem elastic feed", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()

    def free_of(self, peers: Iterable[int]) -> list[int]:
        """Returns those of some members to which something else may be sent."""
        if self._thread is None:
            return list(peers)
        return [peer for peer in peers if not self.is_busy(peer)]

    def is_busy(self, peer: int) -> bool:
        """Returns True if messages for a member are waiting."""
        return bool(self._pending.get(peer))

    def finish(self, limit_s: float) -> None:
        """Waits until all messages are sent, for no longer than a limit."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            self._changed.wait_for(
                lambda: not any(self._pending.values()), max(0.0, deadline - time.monotonic())
            )

    def close(self) -> None:
        """Ends the thread; messages that wait are dropped."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or any(self._pending.values()))
                if self._is_closed:
                    return
                peers = [peer for peer, queue in self._pending.items() if queue]
            poller = select.poll()
            for peer in peers:
                if self._sockets[peer].fileno() >= 0:
                    poller.register(self._sockets[peer], select.POLLOUT)
            poller.poll(_POLL_MS)
            for peer in peers:
                self._send_some(peer)

    def _send_some(self, peer: int) -> None:
        queue = self._pending[peer]
        try:
            count = self._sockets[peer].send(queue[0])
        except BlockingIOError:
            return
        except OSError:
            queue.clear()
        else:
            queue[0] = queue[0][count:]
            if not queue[0].nbytes:
                queue.popleft()
        if not queue:
            with self._changed:
                self._changed.notify_all()

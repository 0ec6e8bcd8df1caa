"""The side of a connection that is asked: receives requests of known clients and answers each."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Collection
from typing import Any

from stratagem.closing import Closing
from stratagem.parameter_server.transport.admission import Admission
from stratagem.parameter_server.transport.client_memories import ClientMemories
from stratagem.parameter_server.transport.keys import ClusterKeys, load_zmq
from stratagem.parameter_server.transport.local_sockets import LocalSocket
from stratagem.parameter_server.transport.wire import (
    HERE,
    KNOWN,
    PING,
    SHARE,
    SHARED,
    UNKNOWN,
    WHERE,
    Message,
    in_parts,
    is_message,
    pack,
    unpack,
)

__all__ = ["Listener", "Request"]

_WAKE_ADDRESS = "inproc://answers"
# How long a listener that closes waits for handlers, and for its last answers to be sent.
_CLOSE_S = 5.0
_LINGER_MS = 200
# How long an answer waits for a client whose connection broke to ask for it by another.
_KEEP_S = 10.0
_KEEP_TICK_MS = 1000


class Request:
    """One request, to be answered once, from any thread.

    Args:
        message: what is asked.
        answer: takes the answer.
    """

    def __init__(self, message: Message, answer: Callable[[Message], None]) -> None:
        self.message = message
        self._answer = answer
        self._lock = threading.Lock()
        self._is_answered = False

    def answer(self, message: Message) -> None:
        """Answers; what is said after the first answer is not sent.

        Args:
            message: the answer. Its arrays must not change until they are sent, and so never.
        """
        with self._lock:
            if not self._is_answered:
                self._answer(message)
                self._is_answered = True  # not where it could not be packed: that is then told

    def fail(self, error: BaseException) -> None:
        """Answers with an error, which the client raises.

        Args:
            error: what went wrong.
        """
        trace = "".join(traceback.format_exception(error))
        fields = {"type": type(error).__name__, "text": str(error), "trace": trace}
        self.answer(Message("error", fields))


class Listener(Closing):
    """A socket at which requests arrive, and the threads that handle them.

    Args:
        keys: of the cluster; clients without them are not heard.
        handle: called with each request, in one of the threads; answers it then or later. What it
            raises is the answer.
        host: the address to listen at, of this machine.
        port: the port; 0 for any that is free.
        num_threads: how many requests are handled at a time.
        at_once: kinds of requests that the thread which receives handles itself: that is faster,
            but nothing else is heard meanwhile.
        is_short: whether it handles a request of another kind itself, too, while no other thread
            handles any.

    Raises:
        OSError: the address is taken, or none of this machine's.
        ImportError: pyzmq is not installed.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        handle: Callable[[Request], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        num_threads: int = 2,
        at_once: Collection[str] = (),
        is_short: Callable[[Message], bool] = lambda message: False,
    ) -> None:
        self._zmq: Any = load_zmq()
        self._handle = handle
        self._at_once = frozenset(at_once)
        self._is_short = is_short
        self._counting = threading.Lock()
        self._num_handed_over = 0  # to other threads, and not handled yet
        self._process = os.getpid()
        self._context: Any = self._zmq.Context()
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        # By number of each request that is not answered yet: the connection by which it, or a ping
        # for it, came last. For the thread that receives.
        self._known: dict[bytes, bytes] = {}
        # Answers whose connection is gone, by number, and since when; the oldest first.
        self._kept: dict[bytes, tuple[float, list[Any]]] = {}
        self._memories = ClientMemories()
        self._waking = threading.Lock()
        self._is_woken = False
        self._is_closed = False
        self._is_ending = threading.Event()
        self.local = LocalSocket.make()
        try:
            self._bind(keys, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._receiver = threading.Thread(target=self._receive, name="listener", daemon=True)
        self._handlers = [
            threading.Thread(target=self._work, name=f"handler {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in (self._receiver, *self._handlers):
            thread.start()

    def close(self, *, limit_s: float | None = None) -> None:
        """Stops to listen; requests that are not answered never are.

        Args:
            limit_s: how long to wait for those that are handled; None for 5 s.
        """
        with self._waking:
            # The threads and sockets of a process that was forked are its parent's.
            if self._is_closed or self._process != os.getpid():
                return
            self._is_closed = True
        for _ in self._handlers:
            self._requests.put(None)
        deadline_s = time.monotonic() + (_CLOSE_S if limit_s is None else limit_s)
        for thread in self._handlers:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline_s - time.monotonic()))
        self._is_ending.set()
        self._wake()
        self._receiver.join()
        with self._waking:
            self._waker.close()
        for socket in (self._woken, self._admission.socket, self._socket):
            socket.close()
        self._context.term()
        if self.local is not None:
            self.local.remove()

    def _bind(self, keys: ClusterKeys, address: str) -> None:
        zmq = self._zmq
        password = None if self.local is None else self.local.password
        self._admission = Admission(self._context, keys.client_public, password)
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # tells that a connection is gone
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = self._socket.rcvhwm = 0
        self._socket.ipv6 = address.startswith("[")
        keys.lock(self._socket)
        with _told_as_os_error(zmq, address):
            self._socket.bind(f"tcp://{address}")
        self.address: str = self._socket.last_endpoint.decode().rstrip("\0")
        if self.local is not None:
            self.local.lock(self._socket)
            try:
                self._socket.bind(self.local.address)
            except zmq.ZMQError:
                self.local = None  # a faster way only: such as on a full disk
        self._woken: Any = self._context.socket(zmq.PULL)
        self._woken.bind(_WAKE_ADDRESS)
        self._waker: Any = self._context.socket(zmq.PUSH)
        self._waker.linger = 0
        self._waker.connect(_WAKE_ADDRESS)

    def _receive(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        for socket in (self._socket, self._woken, self._admission.socket):
            poller.register(socket, zmq.POLLIN)
        is_ending = False
        while not is_ending:
            ready = dict(poller.poll(_KEEP_TICK_MS if self._kept else None))
            if self._woken in ready:
                self._woken.recv()
                with self._waking:  # before the answers are looked at: later ones wake again
                    self._is_woken = False
                is_ending = self._is_ending.is_set()
            if self._admission.socket in ready:
                self._admission.answer()
            if self._socket in ready:
                self._take(self._socket.recv_multipart(copy=False))
            while not self._answers.empty():
                self._give(self._answers.get())
            self._forget_old()

    def _take(self, frames: list[Any]) -> None:
        connection, number, *content = [frame.buffer for frame in frames]
        connection, number = bytes(connection), bytes(number)
        is_known = number in self._known
        if is_known:
            self._known[number] = connection
        if number in self._kept:
            self._give(self._kept.pop(number)[1])
            return
        if not is_message(content):
            told = self._control(connection, content, is_known=is_known)
            self._send([connection, number, *told])
            return
        if is_known:
            return  # it was sent again, although it is worked on
        if not self._memories.can_read(connection, content):  # the client asks after it, and hears
            self._send([connection, number, SHARED, b""])  # that it has to send it again
            return
        self._known[number] = connection

        def answer(message: Message) -> None:
            self._answers.put([number, *pack(message)])
            if threading.current_thread() is not self._receiver:
                self._wake()

        try:
            request = Request(unpack(self._memories.read(connection, content)), answer)
        except ConnectionError as error:
            Request(Message("?"), answer).fail(error)
            return
        is_idle = not self._num_handed_over
        if request.message.kind in self._at_once or (is_idle and self._is_short(request.message)):
            self._handle_one(request)
            return
        with self._counting:
            self._num_handed_over += 1
        self._requests.put(request)

    def _give(self, answer: list[Any]) -> None:
        number, *frames = answer
        connection = self._known[number]
        parts = in_parts(self._memories.placed(connection, frames))
        if self._send([connection, number, *parts]):
            # Not before: who asks meanwhile whether it is worked on must not send it again.
            del self._known[number]
        else:
            self._memories.forget(connection)
            self._kept[number] = (time.monotonic(), answer)

    def _send(self, frames: list[Any]) -> bool:
        """Returns whether the connection is still there."""
        try:
            self._socket.send_multipart(frames, copy=False)
        except self._zmq.ZMQError as error:
            if error.errno != self._zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _forget_old(self) -> None:
        """Forgets answers for which nobody comes."""
        before_s = time.monotonic() - _KEEP_S
        while self._kept and (oldest := next(iter(self._kept.items())))[1][0] <= before_s:
            del self._kept[oldest[0]], self._known[oldest[0]]

    def _control(self, connection: bytes, content: list[Any], *, is_known: bool) -> list[Any]:
        kind, *details = map(bytes, content)
        if kind == SHARE and details:
            return self._memories.share(connection, details[0])
        if kind == PING:
            return [KNOWN if is_known else UNKNOWN, *details]
        if kind == WHERE and self.local is not None:
            return [HERE, self.local.path.encode(), self.local.password]
        return [HERE]

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            self._handle_one(request)
            with self._counting:
                self._num_handed_over -= 1

    def _handle_one(self, request: Request) -> None:
        try:
            self._handle(request)
        except BaseException as error:  # noqa: BLE001 - told to who has asked, who waits for it
            request.fail(error)

    def _wake(self) -> None:
        """Lets the thread that receives look for answers."""
        with self._waking:  # a socket is for one thread at a time
            if self._is_woken or self._waker.closed:  # closed: who answers late, when all is over
                return
            self._is_woken = True
            self._waker.send(b"")


@contextlib.contextmanager
def _told_as_os_error(zmq: Any, address: str) -> Any:
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{error.strerror}: {address}") from error

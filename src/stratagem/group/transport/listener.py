"""Server side of the transport: receives requests of authenticated clients, and answers each."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.group.transport.endpoints import (
    Admission,
    ClusterKeys,
    load_zmq,
    local_address,
    make_local_folder,
)
from stratagem.group.transport.shared_memory import ServerMemory, is_placed
from stratagem.group.transport.wire import (
    KNOWN,
    MOST_FRAME_BYTES,
    SHARE,
    SHARED,
    UNKNOWN,
    Message,
    in_parts,
    is_message,
    pack,
    receive_parts,
    send_parts,
    unpack,
)
from stratagem.resources import Closing

# Shared memory between a listener and its clients, by connection.

_UNUSABLE = (AttributeError, OSError, OverflowError, RecursionError, TypeError, ValueError)


class ClientMemories:
    """Shared memory for large arrays, by client connection. Not thread-safe."""

    def __init__(self) -> None:
        self._memories: dict[bytes, ServerMemory] = {}

    def __len__(self) -> int:
        return len(self._memories)

    def share(self, connection: bytes, offer: bytes) -> list[Any]:
        """Opens memory offered as `ClientMemory.offer`, and returns the answer: usable or not.

        Also drops the memory of clients that have exited.
        """
        self.forget_dead()
        self.forget(connection)
        try:
            self._memories[connection] = ServerMemory(bytes(offer))
        except _UNUSABLE:  # for example, in another container
            return [SHARED, b""]
        return [SHARED, b"here"]

    def can_read(self, connection: bytes, frames: Sequence[Any]) -> bool:
        """Returns True if all frames of a request can be read.

        False after an unnoticed reconnect: the client shared its memory over the previous
        connection.
        """
        return connection in self._memories or not is_placed(frames)

    def read(self, connection: bytes, frames: Sequence[Any]) -> list[Any]:
        """Returns a request with all frames, after `can_read`.

        Raises:
            ConnectionError: a frame lies outside the shared memory.
        """
        return self._memories[connection].read(frames) if is_placed(frames) else [*frames]

    def placed(self, connection: bytes, frames: Sequence[Any]) -> list[Any]:
        """Returns the frames to send, with large arrays moved to shared memory if possible."""
        memory = self._memories.get(connection)
        return [*frames] if memory is None else memory.placed(frames)

    def forget_dead(self) -> None:
        """Drops the memory of clients that have exited or closed it."""
        for other in [other for other, memory in self._memories.items() if not memory.is_in_use]:
            self.forget(other)

    def forget_all(self) -> None:
        """Drops all memory."""
        self._memories.clear()

    def forget(self, connection: bytes) -> None:
        """Drops the memory of a connection that is no longer used."""
        self._memories.pop(connection, None)


_WAKE_ADDRESS = "inproc://answers"
# How long `close` waits for handlers, and for the last answers to be sent.
_CLOSE_S = 5.0
_LINGER_MS = 200
# How long an answer is retained for a client that lost its connection and may reconnect.
_KEEP_S = 10.0
_KEEP_TICK_MS = 1000
# Interval of checks for killed clients, whose shared memory is then released.
_MEMORY_TICK_MS = 10_000
# Limits on peers that have not proved that they belong to the cluster. ZeroMQ closes a connection
# that announces a larger frame, before it allocates memory, or whose handshake takes longer.
_HANDSHAKE_MS = 10_000
_BACKLOG = 1024
# Requests per client that wait to be read. Each thread of a client sends one at a time, and pings.
_MOST_WAITING = 1000


class Request:
    """One request, answered once from any thread; `answer` sends the answer."""

    def __init__(self, message: Message, answer: Callable[[Message], None]) -> None:
        self.message = message
        self._answer = answer
        self._lock = threading.Lock()
        self._is_answered = False

    def answer(self, message: Message) -> None:
        """Sends the first answer and ignores later ones.

        Arrays of the answer must never change: they are sent later.
        """
        with self._lock:
            if not self._is_answered:
                self._answer(message)
                self._is_answered = True  # only if packing succeeded; else `fail` follows

    def fail(self, error: BaseException) -> None:
        """Answers with an error, which the client raises."""
        trace = "".join(traceback.format_exception(error))
        fields = {"type": type(error).__name__, "text": str(error), "trace": trace}
        self.answer(Message("error", fields))


class Listener(Closing):
    """A socket that receives requests, and the threads that handle them.

    Args:
        keys: keys of the cluster; other clients are rejected.
        handle: called with each request in one of the threads; answers now or later. An exception
            becomes the answer.
        host: address of this machine to listen on.
        port: port to listen on; 0 picks a free one.
        num_threads: number of requests handled concurrently.
        is_inline: returns True for a request that the receiving thread handles itself. That is
            faster, but blocks all other requests, and pings. Also gets True while no other thread
            is busy.

    Raises:
        OSError: the address is taken, or does not belong to this machine.
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
        is_inline: Callable[[Message, bool], bool] = lambda message, is_idle: False,
    ) -> None:
        self._zmq: Any = load_zmq()
        self._handle = handle
        self._is_inline = is_inline
        self._counting = threading.Lock()
        self._num_handed_over = 0  # in other threads, not handled yet
        self._process = os.getpid()
        self._context: Any = self._zmq.Context()
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        # Latest connection of each unanswered request (or of a ping for it), by request number.
        # For the receiving thread only.
        self._known: dict[bytes, bytes] = {}
        # Time and content of answers whose connection is gone, by request number; oldest first.
        self._unfetched: dict[bytes, tuple[float, list[Any]]] = {}
        self._memories = ClientMemories()
        self._next_check_s = 0.0
        self._waking = threading.Lock()
        self._is_woken = False
        self._is_closed = False
        self._is_ending = threading.Event()
        self._folder = make_local_folder()
        try:
            self._bind(keys, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        except BaseException:
            self._context.destroy(linger=0)
            self._remove_folder()
            raise
        self._receiver = threading.Thread(target=self._receive, name="listener", daemon=True)
        self._handlers = [
            threading.Thread(target=self._work, name=f"handler {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in (self._receiver, *self._handlers):
            thread.start()

    def close(self, *, limit_s: float | None = None) -> None:
        """Stops listening; pending requests get no answer.

        Waits up to `limit_s` seconds for running handlers; None for 5 s.
        """
        with self._waking:
            # After a fork, threads and sockets belong to the parent.
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
        self._memories.forget_all()
        with self._waking:
            self._waker.close()
        for socket in (self._woken, self._admission.socket, self._socket):
            socket.close()
        self._context.term()
        self._remove_folder()

    @property
    def addresses(self) -> str:
        """TCP address, then that of the Unix socket if there is one, for `Connections`."""
        return f"{self.address} {self.local}".rstrip()

    def _bind(self, keys: ClusterKeys, address: str) -> None:
        zmq = self._zmq
        self._admission = Admission(self._context, keys.client_public)
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # report lost connections
        self._socket.linger = _LINGER_MS
        self._socket.sndhwm = 0  # answers must not block; a client has one request at a time
        self._socket.rcvhwm = _MOST_WAITING
        self._socket.maxmsgsize = MOST_FRAME_BYTES
        self._socket.handshake_ivl = _HANDSHAKE_MS
        self._socket.backlog = _BACKLOG
        self._socket.ipv6 = address.startswith("[")
        keys.lock(self._socket)
        with _raised_as_os_error(zmq, address):
            self._socket.bind(f"tcp://{address}")
        self.address: str = self._socket.last_endpoint.decode().rstrip("\0")
        self._socket.curve_server = False
        self.local = "" if self._folder is None else local_address(self._folder)
        try:
            if self.local:
                self._socket.bind(self.local)
        except zmq.ZMQError:  # optional: a full disk, for example
            self.local = ""
        self._woken: Any = self._context.socket(zmq.PULL)
        self._woken.bind(_WAKE_ADDRESS)
        self._waker: Any = self._context.socket(zmq.PUSH)
        self._waker.linger = 0
        self._waker.connect(_WAKE_ADDRESS)

    def _remove_folder(self) -> None:
        if self._folder is not None:
            self._folder.close()

    def _receive(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        for socket in (self._socket, self._woken, self._admission.socket):
            poller.register(socket, zmq.POLLIN)
        is_ending = False
        while not is_ending:
            ready = dict(poller.poll(self._tick_ms()))
            if self._woken in ready:
                self._woken.recv()
                with self._waking:  # before reading answers: later ones wake again
                    self._is_woken = False
                is_ending = self._is_ending.is_set()
            if self._admission.socket in ready:
                self._admission.answer()
            if self._socket in ready:
                self._take(receive_parts(self._socket))
            while not self._answers.empty():
                self._give(self._answers.get())
            self._forget_old()

    def _tick_ms(self) -> int | None:
        if self._unfetched:
            return _KEEP_TICK_MS
        return _MEMORY_TICK_MS if len(self._memories) else None

    def _take(self, frames: list[Any]) -> None:
        connection, number, *content = [frame.buffer for frame in frames]
        connection, number = bytes(connection), bytes(number)
        is_known = number in self._known
        if is_known:
            self._known[number] = connection
        if number in self._unfetched:
            self._give(self._unfetched.pop(number)[1])
            return
        if not is_message(content):
            reply = self._control(connection, content, is_known=is_known)
            self._send([connection, number, *reply])
            return
        if is_known:
            return  # a resend of a request in progress
        if not self._memories.can_read(connection, content):
            # The client stops using the memory; its next ping makes it resend the request.
            self._send([connection, number, SHARED, b""])
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
        try:
            is_inline = self._is_inline(request.message, not self._num_handed_over)
        except Exception as error:  # noqa: BLE001 - fields are missing, say
            request.fail(error)
            return
        if is_inline:
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
            # Only now: a ping before this point must not trigger a resend.
            del self._known[number]
        else:
            self._memories.forget(connection)
            self._unfetched[number] = (time.monotonic(), answer)

    def _send(self, frames: list[Any]) -> bool:
        """Sends frames; returns False if the connection is gone."""
        try:
            send_parts(self._socket, frames)
        except self._zmq.ZMQError as error:
            if error.errno != self._zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def _forget_old(self) -> None:
        """Drops answers that no client has fetched in time, and memory of killed clients."""
        before_s = time.monotonic() - _KEEP_S
        while self._unfetched and (oldest := next(iter(self._unfetched.items())))[1][0] <= before_s:
            del self._unfetched[oldest[0]], self._known[oldest[0]]
        if len(self._memories) and time.monotonic() >= self._next_check_s:
            self._memories.forget_dead()
            self._next_check_s = time.monotonic() + _MEMORY_TICK_MS / 1000

    def _control(self, connection: bytes, content: list[Any], *, is_known: bool) -> list[Any]:
        kind, *details = map(bytes, content)
        if kind == SHARE and details:
            return self._memories.share(connection, details[0])
        return [KNOWN if is_known else UNKNOWN, *details]  # the answer to a ping

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            self._handle_one(request)
            del request  # its arrays may be in shared memory: do not hold them while waiting
            with self._counting:
                self._num_handed_over -= 1

    def _handle_one(self, request: Request) -> None:
        try:
            self._handle(request)
        except BaseException as error:  # noqa: BLE001 - sent to the waiting client
            request.fail(error)

    def _wake(self) -> None:
        """Makes the receiving thread check for answers."""
        with self._waking:  # sockets are not thread-safe
            if self._is_woken or self._waker.closed:  # closed: an answer after `close`
                return
            self._is_woken = True
            self._waker.send(b"")


@contextlib.contextmanager
def _raised_as_os_error(zmq: types.ModuleType, address: str) -> Any:
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{error.strerror}: {address}") from error

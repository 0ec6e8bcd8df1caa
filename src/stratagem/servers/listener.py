"""The side of a connection that is asked: receives requests of known clients and answers each."""

from __future__ import annotations

import contextlib
import queue
import threading
import traceback
from collections.abc import Callable
from typing import Any

from stratagem.servers.closing import Closing
from stratagem.servers.keys import ClusterKeys, load_zmq
from stratagem.servers.wire import Message, pack, unpack

__all__ = ["Listener", "Request"]

_WAKE_ADDRESS = "inproc://answers"


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
            if self._is_answered:
                return
            self._is_answered = True
        self._answer(message)

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
    ) -> None:
        self._zmq: Any = load_zmq()
        self._handle = handle
        self._context: Any = self._zmq.Context()
        self._authenticator: Any = load_zmq("zmq.auth.thread").ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback("*", _Known(keys.client_public))
        self._requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._waking = threading.Lock()
        self._is_closed = threading.Event()
        try:
            self._socket: Any = self._context.socket(self._zmq.ROUTER)
            self._socket.router_handover = True  # a client that connects anew is still the same
            self._socket.linger = 0
            self._socket.ipv6 = ":" in host
            keys.lock(self._socket)
            named = f"[{host}]" if ":" in host else host
            with _told_as_os_error(self._zmq, f"{named}:{port}"):
                self._socket.bind(f"tcp://{named}:{port}")
            self.address = self._socket.last_endpoint.decode().rstrip("\0")
            self._woken: Any = self._context.socket(self._zmq.PULL)
            self._woken.bind(_WAKE_ADDRESS)
            self._waker: Any = self._context.socket(self._zmq.PUSH)
            self._waker.connect(_WAKE_ADDRESS)
        except BaseException:
            self._authenticator.stop()
            self._context.destroy(linger=0)
            raise
        self._threads = [threading.Thread(target=self._receive, name="listener", daemon=True)]
        self._threads += [
            threading.Thread(target=self._work, name=f"handler {number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stops to listen; requests that are not answered never are."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        self._wake()
        for _ in self._threads[1:]:
            self._requests.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._authenticator.stop()
        with self._waking:
            self._waker.close(linger=0)
        self._context.destroy(linger=0)

    def _receive(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._woken, zmq.POLLIN)
        while not self._is_closed.is_set():
            ready = dict(poller.poll())
            if self._woken in ready:
                self._woken.recv()
            if self._socket in ready:
                self._take(self._socket.recv_multipart(copy=False))
            while not self._answers.empty():
                # To a client that has gone it is dropped.
                self._socket.send_multipart(self._answers.get(), copy=False)

    def _take(self, frames: list[Any]) -> None:
        client, number, *content = frames

        def answer(message: Message) -> None:
            self._answers.put([client.bytes, number.bytes, *pack(message)])
            if threading.current_thread() is not self._threads[0]:
                self._wake()

        try:
            message = unpack([frame.buffer for frame in content])
        except ConnectionError as error:
            Request(Message("?"), answer).fail(error)
            return
        self._requests.put(Request(message, answer))

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._handle(request)
            except Exception as error:  # noqa: BLE001 - told to who has asked
                request.fail(error)

    def _wake(self) -> None:
        """Lets the thread that receives look for answers."""
        with self._waking:  # a socket is for one thread at a time
            if not self._waker.closed:  # who answers late, when all is over
                self._waker.send(b"")


class _Known:
    """Which clients an authenticator lets in."""

    def __init__(self, client_public: bytes) -> None:
        self._client_public = client_public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._client_public


@contextlib.contextmanager
def _told_as_os_error(zmq: Any, address: str) -> Any:
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"{error.strerror}: {address}") from error

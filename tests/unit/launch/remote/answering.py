"""Plain servers in place of Ray's: one that answers, and one that only listens, as when stopped."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator

__all__ = ["answering", "listening"]


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.recv(1)
        with contextlib.suppress(OSError):
            self.request.sendall(b"x")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


@contextlib.contextmanager
def answering(port: int = 0) -> Iterator[str]:
    """Yields the address of a server that answers whatever is sent."""
    with _Server(("127.0.0.1", port), _Answer) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@contextlib.contextmanager
def listening() -> Iterator[str]:
    """Yields an address that accepts connections, because the kernel does, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"

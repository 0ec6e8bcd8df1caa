"""Services of Ray, as seen from outside: whether they answer, not only whether they listen.

A process that was stopped still accepts connections, because the kernel does.
"""

from __future__ import annotations

import socket
import time

from stratagem import environment
from stratagem.cluster.addresses import split_address

# The first bytes of a client, which a server answers without authentication: the preface of HTTP/2
# with empty settings, and a request. A server with TLS closes the connection, which is an answer.
GRPC = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
HTTP = b"GET / HTTP/1.0\r\n\r\n"

_PROBE_S = 1.0
# A service that refuses connections this long has ended; a slow one refuses none.
_REFUSED_S = 3.0


def probe(address: str, greeting: bytes = GRPC) -> str:
    """Greets a service at host:port; returns "there", "refused", or why the result is unknown."""
    try:
        with socket.create_connection(split_address(address), timeout=_PROBE_S) as connection:
            connection.sendall(greeting)
            connection.recv(1)
    except ConnectionRefusedError:
        return "refused"
    except (ConnectionResetError, BrokenPipeError):
        return "there"
    except TimeoutError:
        return f"no answer within {_PROBE_S:g} s"
    except OSError as error:
        return str(error)
    return "there"


class Service:
    """Answers of a service to greetings, for a look each second.

    `has_started` is False for one that may still start, within `STRATAGEM_JOIN_TIMEOUT_S`.
    """

    def __init__(
        self, name: str, address: str, greeting: bytes = GRPC, *, has_started: bool = True
    ) -> None:
        self.name = name
        self.address = address
        self._greeting = greeting
        self._has_started = has_started
        self._silent_since_s: float | None = None
        self._refused_since_s: float | None = None

    def look(self) -> None:
        """Greets it once."""
        answer, now_s = probe(self.address, self._greeting), time.monotonic()
        self._has_started = self._has_started or answer == "there"
        self._silent_since_s = None if answer == "there" else self._silent_since_s or now_s
        self._refused_since_s = (self._refused_since_s or now_s) if answer == "refused" else None

    @property
    def has_ended(self) -> bool:
        """True if it has refused connections for a while."""
        return self._has_started and _is_longer(self._refused_since_s, _REFUSED_S)

    @property
    def is_lost(self) -> bool:
        """True if it has ended, or has not answered within `STRATAGEM_PEER_TIMEOUT_S`."""
        limit_s = float(
            environment.read("peer_timeout_s" if self._has_started else "join_timeout_s")
        )
        return self.has_ended or _is_longer(self._silent_since_s, limit_s)


def _is_longer(since_s: float | None, limit_s: float) -> bool:
    return since_s is not None and time.monotonic() - since_s > limit_s

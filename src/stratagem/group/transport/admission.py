"""Authentication of new client connections to a listener, before any message is read."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from stratagem.group.transport.keys import load_zmq

if TYPE_CHECKING:
    import zmq


_ADDRESS = "inproc://zeromq.zap.01"
_VERSION = b"1.0"


class Admission:
    """Answers ZeroMQ's authentication requests.

    Args:
        context: ZeroMQ context of the sockets to protect.
        client_public: key of clients over TCP.
        password: password of clients over the Unix socket; None if there is no such socket.

    Source: ZeroMQ RFC 27, ZAP.
    """

    def __init__(
        self, context: zmq.Context[Any], client_public: bytes, password: bytes | None
    ) -> None:
        zmq = load_zmq()
        self._key: bytes = load_zmq("zmq.utils.z85").decode(client_public)
        self._password = password
        self.socket: Any = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answers one request, which must have arrived."""
        version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        is_known = version == _VERSION and self._knows(mechanism, credentials)
        status = (b"200", b"") if is_known else (b"400", b"not a member of this cluster")
        self.socket.send_multipart([_VERSION, number, *status, b"", b""])

    def _knows(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if mechanism == b"CURVE":
            return credentials == [self._key]
        if mechanism == b"PLAIN" and self._password is not None:
            return secrets.compare_digest(b"".join(credentials[1:]), self._password)
        return False

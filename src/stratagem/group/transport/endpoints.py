"""Addresses and keys of listeners.

Between machines, ZeroMQ's CURVE encrypts all traffic and authenticates clients before any message
is read. Processes of one user on one machine use a Unix socket without encryption: any process that
could read the messages could also read the keys from memory. Only the user can enter its folder. A
listener gives both addresses from the start, as one string; a client takes the Unix socket if it
can reach it. Its name is random, so a listener with the same port in another network namespace, or
on another machine that shares the folder, is never taken for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stratagem.environment import load
from stratagem.resources import TemporaryFolder

if TYPE_CHECKING:
    import zmq


def load_zmq(module: str = "zmq") -> Any:
    """Returns pyzmq or one of its modules; raises ImportError if it is not installed."""
    return load(module, needed_by="a parameter server", install="stratagem[ray]")


@dataclasses.dataclass(frozen=True)
class ClusterKeys:
    """Keys of all servers and all clients of a cluster, computed from its secret."""

    secret: bytes = dataclasses.field(repr=False)

    @classmethod
    def make(cls) -> ClusterKeys:
        """Returns new random keys."""
        return cls(secrets.token_bytes(32))

    def lock(self, listening: zmq.Socket[Any]) -> None:
        """Makes the next address that a socket binds encrypt, and prove that it is the cluster's.

        Its context needs an `Admission`.
        """
        listening.curve_server = True
        _, listening.curve_secretkey = self._pair("server")

    def unlock(self, connecting: zmq.Socket[Any]) -> None:
        """Makes a socket that is not connected yet encrypt, and prove that it is the cluster's."""
        connecting.curve_serverkey = self.server_public
        connecting.curve_publickey, connecting.curve_secretkey = self._pair("client")

    @property
    def server_public(self) -> bytes:
        """Public key of servers."""
        return self._pair("server")[0]

    @property
    def client_public(self) -> bytes:
        """Public key of clients."""
        return self._pair("client")[0]

    def _pair(self, side: str) -> tuple[bytes, bytes]:
        key = hmac.digest(self.secret, f"curve {side}".encode(), hashlib.sha256)
        secret = load_zmq("zmq.utils.z85").encode(key)
        return load_zmq().curve_public(secret), secret


_ZAP_ADDRESS, _ZAP_VERSION = "inproc://zeromq.zap.01", b"1.0"


class Admission:
    """Lets in clients over TCP with the public key. Source: ZeroMQ RFC 27, ZAP."""

    def __init__(self, context: zmq.Context[Any], client_public: bytes) -> None:
        zmq = load_zmq()
        self._key: bytes = load_zmq("zmq.utils.z85").decode(client_public)
        self.socket: Any = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)

    def answer(self) -> None:
        """Answers one request, which must have arrived."""
        version, number, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        is_known = (version, mechanism, credentials) == (_ZAP_VERSION, b"CURVE", [self._key])
        status = (b"200", b"") if is_known else (b"400", b"not a member of this cluster")
        self.socket.send_multipart([_ZAP_VERSION, number, *status, b"", b""])


# The system limit includes a terminating zero: 108 on Linux, 104 on macOS.
_MAX_PATH_BYTES = 103
_LOCAL = "ipc://"


def make_local_folder() -> TemporaryFolder | None:
    """Returns a private folder for a Unix socket; None if the system has none, or a long path."""
    if hasattr(socket, "AF_UNIX"):
        with contextlib.suppress(OSError):
            folder = TemporaryFolder("stratagem-socket-")
            if len(os.fsencode(folder.path / "socket")) <= _MAX_PATH_BYTES:
                return folder
            folder.close()
    return None


def local_address(folder: TemporaryFolder) -> str:
    """Returns the address of the Unix socket in a folder, in ZeroMQ's format."""
    return f"{_LOCAL}{folder.path / 'socket'}"


class Place(NamedTuple):
    """Addresses of a listener, `local` only if it can be reached from here; in ZeroMQ's format."""

    address: str
    local: str | None = None

    @classmethod
    def of(cls, addresses: str) -> Place:
        """Reads `Listener.addresses`, or a TCP address."""
        address, _, local = addresses.partition(" ")
        return cls(address, local if is_reachable(local) else None)


def is_reachable(local: str) -> bool:
    """Returns True if a process of this user listens on a Unix socket, on this machine."""
    if not local:
        return False
    path = Path(local.removeprefix(_LOCAL))
    try:
        folder, status = path.parent.lstat(), path.lstat()
        is_private = stat.S_ISDIR(folder.st_mode) and not folder.st_mode & 0o077
        is_ours = stat.S_ISSOCK(status.st_mode) and {folder.st_uid, status.st_uid} == {os.geteuid()}
        return is_private and is_ours and _listens(path)
    except OSError:
        return False


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(0)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True  # its queue is full
        except OSError:
            return False
        return True

"""Unix sockets for unencrypted messages between processes on one machine.

Encryption between two processes of one user adds no protection: any process that could read the
messages could also read the keys from memory. Such a socket is as safe as CURVE because

- only its user can enter its folder or replace it, except root, which can read all memory anyway;
- its name is random, and clients receive name and password from the server over CURVE. So they
  cannot reach another server with the same port in another network namespace, or one on another
  machine that shares the folder. Without cluster keys, a client gets no password.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import socket
import stat
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem import environment

if TYPE_CHECKING:
    import zmq


_USER = b"client"
# The system limit includes a terminating zero: 108 on Linux, 104 on macOS.
_MAX_PATH_BYTES = 103
_NAME_BYTES = 16
# A younger socket may not listen yet, which looks like a socket of a dead process.
_LEAST_AGE_S = 2.0


@dataclasses.dataclass(frozen=True)
class LocalSocket:
    """Path and password of a server's Unix socket, for processes on its machine."""

    path: str
    password: bytes = dataclasses.field(repr=False)

    @classmethod
    def make(cls) -> LocalSocket | None:
        """Returns a socket with a free path, or None without a suitable private folder."""
        folder = _folder()
        if folder is None:
            return None
        _remove_those_of_the_dead(folder)
        name = secrets.token_hex(_NAME_BYTES // 2)
        return cls(str(folder / name), secrets.token_hex(16).encode())

    @property
    def address(self) -> str:
        """Address in ZeroMQ's format."""
        return f"ipc://{self.path}"

    def lock(self, listening: zmq.Socket[Any]) -> None:
        """Makes the next address that a ZeroMQ socket binds require the password."""
        listening.curve_server = False
        listening.plain_server = True

    def unlock(self, connecting: zmq.Socket[Any]) -> None:
        """Sets the password on a ZeroMQ socket that is not connected yet."""
        connecting.plain_username = _USER
        connecting.plain_password = self.password

    def is_reachable(self) -> bool:
        """Returns True if a process of this user listens on the socket, on this machine."""
        path = Path(self.path)
        try:
            return _is_private(path.parent) and _is_ours(path) and _listens(path)
        except OSError:
            return False

    def make_folder(self) -> bool:
        """Makes the socket's folder again; returns True if it is there and private."""
        folder = Path(self.path).parent
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            return _is_private(folder)
        except OSError:
            return False

    def remove(self) -> None:
        """Removes the socket file, those of dead processes, and the folder if it is then empty."""
        folder = Path(self.path).parent
        with contextlib.suppress(OSError):
            os.unlink(self.path)
        _remove_those_of_the_dead(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()


def sweep_local_sockets() -> None:
    """Removes sockets of killed processes of this user, and their folder if it is then empty."""
    folder = _folder()
    if folder is not None:
        _remove_those_of_the_dead(folder)
        with contextlib.suppress(OSError):
            folder.rmdir()


def _folder() -> Path | None:
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "geteuid"):
        return None
    for base in (environment.lookup("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if base is None:
            continue
        with contextlib.suppress(OSError):
            folder = Path(base).resolve() / f"stratagem-{os.geteuid()}"
            if len(os.fsencode(folder)) + 1 + _NAME_BYTES > _MAX_PATH_BYTES:
                continue
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            if _is_private(folder):
                return folder
    return None


def _is_private(folder: Path) -> bool:
    """Returns True if only this user can enter or replace a folder."""
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o077 and all(map(_is_protected, folder.parents))


def _is_protected(folder: Path) -> bool:
    status = folder.lstat()
    is_shared = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    return stat.S_ISDIR(status.st_mode) and not is_shared and status.st_uid in (0, os.geteuid())


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    return stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid()


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


def _remove_those_of_the_dead(folder: Path) -> None:
    paths: list[Path] = []
    with contextlib.suppress(OSError):  # another process has just removed the folder
        paths = list(folder.iterdir())
    for path in paths:
        with contextlib.suppress(OSError):
            # A file from the future is older than a change of the clock.
            is_new = abs(time.time() - path.lstat().st_mtime) <= _LEAST_AGE_S
            if not is_new and _is_ours(path) and not _listens(path):
                path.unlink()

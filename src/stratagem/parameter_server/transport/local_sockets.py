"""Unix sockets, by which processes on one machine exchange messages that are not encrypted.

Encryption between two processes of one user on one machine guards nothing: whoever could read the
messages could also read the keys in the memory of either. Such a socket is as safe as CURVE because

- its folder can be entered by its user only, and nobody else can put another in its place; root
  can, and can read every memory;
- its name is random, and a client learns name and password over CURVE, from the server itself: so
  it finds neither another server that has the same port in another network namespace, nor one on
  another machine that shares the folder, and who has no keys has no password.
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
from typing import Any

from stratagem import environment

__all__ = ["LocalSocket"]

_USER = b"client"
# Of the path, with the zero at its end: 108 on Linux, 104 on macOS.
_MAX_PATH_BYTES = 103
_NAME_BYTES = 16
# One that was made but does not listen yet looks like that of a dead process.
_LEAST_AGE_S = 60.0


@dataclasses.dataclass(frozen=True)
class LocalSocket:
    """Local socket of a server, for processes on its machine.

    Args:
        path: of the Unix socket.
        password: which a client tells.
    """

    path: str
    password: bytes = dataclasses.field(repr=False)

    @classmethod
    def make(cls) -> LocalSocket | None:
        """Returns a new one, whose path is free.

        Returns:
            None where there is no folder for it that only this user can enter.
        """
        folder = _folder()
        if folder is None:
            return None
        _remove_those_of_the_dead(folder)
        name = secrets.token_hex(_NAME_BYTES // 2)
        return cls(str(folder / name), secrets.token_hex(16).encode())

    @property
    def address(self) -> str:
        """As ZeroMQ writes it."""
        return f"ipc://{self.path}"

    def lock(self, listening: Any) -> None:
        """Makes what a socket is bound to next ask for the password.

        Args:
            listening: a socket of ZeroMQ.
        """
        listening.curve_server = False
        listening.plain_server = True

    def unlock(self, connecting: Any) -> None:
        """Makes a socket tell the password.

        Args:
            connecting: a socket of ZeroMQ, not connected yet.
        """
        connecting.plain_username = _USER
        connecting.plain_password = self.password

    def is_reachable(self) -> bool:
        """Returns whether somebody listens there, on this machine, who can only be this user."""
        path = Path(self.path)
        try:
            return _is_private(path.parent) and _is_ours(path) and _listens(path)
        except OSError:
            return False

    def remove(self) -> None:
        """Removes the file, if it is still there."""
        with contextlib.suppress(OSError):
            os.unlink(self.path)


def _folder() -> Path | None:
    if not hasattr(socket, "AF_UNIX") or not hasattr(os, "geteuid"):
        return None
    for base in (environment.lookup("XDG_RUNTIME_DIR"), tempfile.gettempdir()):
        if base is None:
            continue
        with contextlib.suppress(OSError):
            folder = Path(base).resolve() / f"stratagem-{os.geteuid()}"
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
            is_short = len(os.fsencode(folder)) + 1 + _NAME_BYTES <= _MAX_PATH_BYTES
            if is_short and _is_private(folder):
                return folder
    return None


def _is_private(folder: Path) -> bool:
    """Returns True if only this user can enter or replace a folder."""
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    return is_own and not status.st_mode & 0o077 and all(map(_is_kept, folder.parents))


def _is_kept(folder: Path) -> bool:
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
            return True  # many connect at this moment
        except OSError:
            return False
        return True


def _remove_those_of_the_dead(folder: Path) -> None:
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            is_old = time.time() - path.lstat().st_mtime > _LEAST_AGE_S
            if is_old and _is_ours(path) and not _listens(path):
                path.unlink()

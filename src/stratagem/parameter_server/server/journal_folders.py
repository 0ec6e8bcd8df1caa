"""Temporary journal folders of runs, and removal of those that killed runs left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import time
from pathlib import Path

from stratagem.closing import Closing

if sys.platform != "win32":
    import fcntl

__all__ = ["RunFolder", "remove_journal", "sweep_journals"]

_PREFIX = "stratagem-journals-"
_OWNER = "owner.lock"
# A younger folder may not be locked yet.
_LEAST_AGE_S = 60.0
# A server that died may be about to restart, and its coordinator may be on another machine.
_ABANDONED_S = 24 * 3600.0


class RunFolder(Closing):
    """Temporary folder for the journals of a run on this machine; `close` removes it.

    This process holds a lock in it. Also removes folders whose process was killed.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        for folder in _own_folders(base, f"{_PREFIX}*"):
            if _age_s(folder) > _LEAST_AGE_S and _are_free(folder):
                shutil.rmtree(folder, ignore_errors=True)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self._process = os.getpid()
        self._descriptor = os.open(self.path / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        if sys.platform != "win32":
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)

    def close(self) -> None:
        """Removes the folder."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._process == os.getpid():  # else a fork
                shutil.rmtree(self.path, ignore_errors=True)


def remove_journal(journal: Path) -> None:
    """Removes a journal that no later run uses, its lock, and folders that are then empty."""
    for path in (journal, Path(f"{journal}.lock")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other servers use them
        journal.parent.rmdir()
        journal.parent.parent.rmdir()


def sweep_journals(base: Path) -> None:
    """Removes this user's journal folders in `base` that no process has used for a day."""
    for folder in _own_folders(base, "*"):
        newest_s = min((_age_s(path) for path in (folder, *_files(folder))), default=0.0)
        if newest_s > _ABANDONED_S and _are_free(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _own_folders(base: Path, pattern: str) -> list[Path]:
    folders: list[Path] = []
    for path in base.glob(pattern):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                folders.append(path)
    return folders


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0


def _are_free(folder: Path) -> bool:
    """Returns True if no process holds one of the locks in a folder."""
    return all(_is_free(path) for path in _files(folder) if path.suffix == ".lock")


def _is_free(lock: Path) -> bool:
    if sys.platform == "win32":
        return False
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True

"""Resources of a process: `with` blocks, folders, temporary folders, processor time."""

from __future__ import annotations

import abc
import atexit
import contextlib
import functools
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Generator
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from stratagem import settings
from stratagem.errors import invalid

# Base class of objects that a `with` block closes.


class Closing(abc.ABC):
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        """Returns itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Releases its resources."""


# Values that hold for the time of a `with` block.

_T = TypeVar("_T")


@contextlib.contextmanager
def setting(variable: ContextVar[_T], value: _T) -> Generator[_T]:
    """Sets a context variable within a `with` block."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


@contextlib.contextmanager
def changing(owner: Any, **values: Any) -> Generator[None]:
    """Sets attributes of an object within a `with` block."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


if sys.platform != "win32":
    import fcntl


_OWNER = "owner.lock"
# A folder gets its final name once it is locked. One that has not yet may belong to a process that
# is about to, unless it is older than this.
_UNNAMED = ".new-"
_ABANDONED_S = 60.0


class TemporaryFolder(Closing):
    """Private folder with a name that begins with `prefix`; removed by `close`, or at exit.

    This process holds a lock in it, which the operating system releases when the process is killed.
    Making a folder removes those of the same prefix and this user without such a process. `base` is
    the parent, `tempfile.gettempdir()` if None. On Windows nothing is locked or removed early.
    """

    def __init__(self, prefix: str, base: str | os.PathLike[str] | None = None) -> None:
        parent = Path(tempfile.gettempdir() if base is None else base)
        _sweep(parent, prefix)
        unnamed = Path(tempfile.mkdtemp(prefix=f"{_UNNAMED}{prefix}", dir=parent))
        self.path = parent / unnamed.name.removeprefix(_UNNAMED)
        self._process = os.getpid()
        self._descriptor = os.open(unnamed / _OWNER, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if sys.platform != "win32":
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            unnamed.rename(self.path)
        except OSError:  # such as a file system without locks
            shutil.rmtree(unnamed, ignore_errors=True)
            os.close(self._descriptor)
            raise
        atexit.register(self.close)

    def close(self) -> None:
        """Removes the folder."""
        atexit.unregister(self.close)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            if self._process == os.getpid():  # else a fork
                shutil.rmtree(self.path, ignore_errors=True)


def own_folders(base: Path, pattern: str) -> list[Path]:
    """Returns the folders in `base` that match a pattern and belong to this user; no links."""
    folders: list[Path] = []
    for path in base.glob(pattern):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                folders.append(path)
    return folders


def are_free(folder: Path) -> bool:
    """Returns True if no process holds one of the locks (`*.lock`) in a folder."""
    return all(map(_is_free, folder.glob("*.lock")))


def remove_abandoned_folders() -> None:
    """Removes temporary folders of processes that were killed; call when such processes are gone.

    The next process that makes such a folder does the same, but there may be none.
    """
    _sweep(Path(tempfile.gettempdir()), "stratagem-")


def _sweep(base: Path, prefix: str) -> None:
    for folder in own_folders(base, f"{prefix}*"):
        if (folder / _OWNER).exists() and are_free(folder):
            shutil.rmtree(folder, ignore_errors=True)
    for folder in own_folders(base, f"{_UNNAMED}{prefix}*"):
        with contextlib.suppress(OSError):
            # A folder from the future is older than a change of the clock.
            is_new = abs(time.time() - folder.lstat().st_mtime) <= _ABANDONED_S
            if not is_new and are_free(folder):
                shutil.rmtree(folder, ignore_errors=True)


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


# Folders: that of an argument, and that of compiled programs.


def checked_folder(name: str, folder: str | os.PathLike[str]) -> str:
    """Returns a folder's path; raises ValueError if it is empty, as an unset variable is.

    `name` is the argument's name for the message.
    """
    path = os.fspath(folder)
    if not path:
        raise invalid(
            f"{name}={folder!r} is empty.",
            expected="the path of a folder.",
            fix='pass a path; "." is the current folder.',
        )
    return path


def cache_dir() -> Path:
    """Returns the folder for what is cached for later runs; it may not exist."""
    return Path(settings.read("cache_dir")).expanduser()


def programs_folder(cache: Path) -> Path:
    """Returns the folder of programs that were compiled for this machine's CPU; it may not exist.

    Programs for a CPU use the instruction sets of the machine that compiled them, and a home folder
    can be shared by several machines.
    """
    return cache / "programs" / hashlib.sha256(_cpu().encode()).hexdigest()[:12]


@functools.cache
def _cpu() -> str:
    """Returns the architecture and the instruction sets of the CPU."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {flags or platform.processor()}"


# Cores that this process may use.

_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> float:
    """Returns the cores that this process may use; a container may allow a part of one."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    try:
        quota, _, period = (cgroup / "cpu.max").read_text(encoding="utf-8").strip().partition(" ")
    except OSError:
        return cores
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, int(quota) / int(period))
    return cores

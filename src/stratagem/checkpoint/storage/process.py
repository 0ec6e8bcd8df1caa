"""Client of the storage process, which writes checkpoints outside the training process.

In the training process, Orbax would synchronize JAX's whole group on every save, with broadcasts
that hang if a process is lost. It would also stall training by holding Python's lock.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing as mp
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from stratagem import environment, settings
from stratagem.checkpoint.storage.files import Arrays
from stratagem.checkpoint.storage.shards import (
    ShardedWrite,
    is_of_shards,
    remove_shards,
    report_shard_error,
    silence_error,
    wait_for_shards,
)
from stratagem.checkpoint.storage.staging import ArrayLocation, Staging
from stratagem.errors import DeadlineExceededError, explain, take_reported

# Memory that this process can still allocate.

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# A third stays free for what else is allocated meanwhile, here and in other processes.
_RESERVE = 1.5


def fits_in_memory(size_bytes: int) -> bool:
    """True if so much memory can be allocated, with a reserve; also outside Linux."""
    available_bytes = available_memory_bytes()
    return available_bytes is None or size_bytes * _RESERVE <= available_bytes


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Returns the memory of the machine, or of its container if less, without swap.

    The page cache counts as available. None where the kernel does not tell.
    """
    fields = _fields(meminfo)
    if "MemAvailable:" not in fields:
        return None
    available_bytes = fields["MemAvailable:"] * 1024
    try:
        limit_bytes = int((cgroup / "memory.max").read_text(encoding="utf-8"))
        used_bytes = int((cgroup / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no container, or one without a limit
        return available_bytes
    cached_bytes = _fields(cgroup / "memory.stat").get("inactive_file", 0)
    return min(available_bytes, max(limit_bytes - used_bytes + cached_bytes, 0))


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value, *_ in (line.split() for line in lines)}


# Signals with which a terminal or a scheduler ends training.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_END_S = 10.0
_MAIN = "stratagem.checkpoint.storage.process_main"


class StorageProcess:
    """A separate process that writes checkpoints, one at a time.

    It shares memory with this process, so that a save costs training one copy. It finishes pending
    writes before it ends with this process.
    """

    def __init__(self) -> None:
        self._staging = Staging()
        self._connection, theirs = mp.Pipe()
        descriptors = (theirs.fileno(), self._staging.descriptor)
        # Start it with these blocked; it unblocks them once it can handle them. A signal to end
        # training may arrive before its imports are done.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", _MAIN, *map(str, descriptors)],
                env=environment.without_cluster(),
                stdin=subprocess.DEVNULL,
                pass_fds=descriptors,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._thread = ThreadPoolExecutor(1, "stratagem-storage")
        self._last: Future[Any] | None = None
        self._lock = threading.RLock()

    @property
    def is_alive(self) -> bool:
        """True while the process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def write(
        self,
        place: Callable[[], Path],
        items: Mapping[str, Arrays],
        notes: Mapping[str, Any],
        *,
        then: Callable[[Path], None],
        sharded: ShardedWrite | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> Future[None]:
        """Copies arrays and writes them in the background, after the previous write.

        In another thread, `place` is called for the folder, which must not exist, and `then` with
        it after the write. With `sharded`, this is process 0, whose shards are in `items`, too;
        `check` is called while it waits for those of the others. Returns a Future that is done
        after `then`, with the error of any of them.
        """
        with self._lock:
            self.wait()
            locations = self._staging.put(items)
            names = [name for name in items if not is_of_shards(name)]

            def work() -> None:
                if sharded is not None:
                    self._collect_shards(sharded, locations, check)
                folder = place()
                self._request("write", folder, locations, names, dict(notes), sharded)
                then(folder)

            return self._submit(work)

    def write_shards(
        self, folder: Path, process_id: int, items: Mapping[str, Arrays]
    ) -> Future[None]:
        """Copies this process's shards and writes them in the background.

        Process 0 gets the error of any failure, too.
        """
        with self._lock:
            self.wait()
            locations = self._staging.put(items)

            def work() -> None:
                try:
                    self._request("write_shards", folder, process_id, locations)
                except Exception as error:
                    report_shard_error(folder, process_id, error)
                    raise

            return self._submit(work)

    def _collect_shards(
        self, sharded: ShardedWrite, locations: list[ArrayLocation], check: Callable[[], None]
    ) -> None:
        try:
            own = [one for one in locations if is_of_shards(one.item)]
            self._request("write_shards", sharded.folder, 0, own)
            limit_s = settings.read("save_timeout_s")
            wait_for_shards(sharded, limit_s=limit_s, check=check)
        except Exception:
            remove_shards(sharded)
            raise

    @property
    def memory_bytes(self) -> int:
        """Size of the memory into which arrays are copied."""
        return self._staging.size_bytes

    def reserve(self, size_bytes: int) -> None:
        """Allocates memory for the first `write` in another thread."""
        with self._lock:
            self._submit(lambda: self._staging.reserve(size_bytes))

    def wait(self) -> None:
        """Waits until pending work and its callbacks are done; errors stay with their futures."""
        if self._last is not None:
            self._last.exception()
            # Callbacks of the future run after it is done, but before the thread's next task.
            with contextlib.suppress(RuntimeError):  # the thread accepts no task at exit
                self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Waits for pending work and ends the process."""
        with self._lock:
            self._thread.shutdown()
            self._connection.close()
            self._kill()
            self._staging.close()

    def _kill(self) -> None:
        """Kills the process, and waits for its end unless a disk keeps it from ending."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        self._last = self._thread.submit(work)
        return self._last

    def _request(self, name: str, folder: Path, *arguments: object) -> Any:
        try:
            self._connection.send((name, folder, *arguments))
            if not self._connection.poll(limit_s := settings.read("save_timeout_s")):
                self._kill()  # the next request starts another one
                raise silence_error(
                    f"The storage process has not answered during {name} of {folder}", limit_s
                )
            result, error = self._connection.recv()
        except DeadlineExceededError:
            raise
        except (EOFError, OSError) as error:
            raise self._exit_error(name, folder) from error
        if error is not None:
            raise error
        return result

    def _exit_error(self, name: str, folder: Path) -> OSError:
        returncode = self._process.wait()
        return OSError(
            explain(
                f"The storage process exited with {returncode} during {name} of {folder}.",
                expected="a process that runs as long as training. It uses as much memory as one "
                "checkpoint, and ignores signals that end training.",
                fix="check whether the machine ran out of memory. The next checkpoint restarts "
                "the process; earlier checkpoints are unchanged.",
            )
        )


_processes: list[StorageProcess] = []
_processes_lock = threading.Lock()


def storage_process() -> StorageProcess:
    """Returns the storage process of this process; starts it if there is none."""
    with _processes_lock:
        if _processes and not _processes[0].is_alive:
            _processes.pop().close()
        if not _processes:
            _processes.append(StorageProcess())
            atexit.register(_finish)
        return _processes[0]


def has_room_for_copy(size_bytes: int) -> bool:
    """True if memory for a copy of so many bytes exists or can be allocated."""
    return fits_in_memory(size_bytes - sum(process.memory_bytes for process in _processes))


def wait_for_writing() -> None:
    """Waits for pending writes; starts no storage process."""
    for process in _processes:
        process.wait()


def _finish() -> None:
    """At exit, finishes pending writes and prints errors that were not raised."""
    for process in _processes:
        process.close()
    _processes.clear()
    for error in take_reported():
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _forget() -> None:
    """Forgets the parent's storage process in a forked child, which starts its own."""
    _processes.clear()


os.register_at_fork(after_in_child=_forget)

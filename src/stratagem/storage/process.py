"""A process beside training that reads and writes checkpoints, seen from training.

There are two reasons for it. Orbax meets all processes of JAX's group whenever it saves or loads,
in broadcasts that know no loss, so it has to be called outside of that group. And what it does
takes Python's lock, for which training would wait.
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

import numpy as np

from stratagem import environment
from stratagem.background_errors import take_reported
from stratagem.messages import explain
from stratagem.storage.files import Arrays, Wanted
from stratagem.storage.staging import Staging

__all__ = ["ENDING_SIGNALS", "StorageProcess", "storage_process", "wait_for_writing"]

# What ends training when it comes from a terminal or a scheduler.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)

_MAIN = "stratagem.storage.process_main"


class StorageProcess:
    """A process that is started once, and does one thing after the other.

    It shares its memory with this one, so that a checkpoint costs training a copy. It ends with
    this process, when it has finished what it was told to write.

    Raises:
        OSError: the system starts no more processes.
    """

    def __init__(self) -> None:
        self._staging = Staging()
        self._connection, theirs = mp.Pipe()
        descriptors = (theirs.fileno(), self._staging.descriptor)
        # It begins with these blocked, and lets them in when it can handle them: what asks training
        # to end may come before it has loaded anything.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        try:
            self._process = subprocess.Popen(
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
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def write(
        self,
        place: Callable[[], Path],
        items: Mapping[str, Arrays],
        notes: Mapping[str, Any],
        *,
        then: Callable[[Path], None],
    ) -> Future[None]:
        """Takes a copy of arrays, and writes it while the caller goes on.

        One checkpoint is written at a time: this waits for the one before.

        Args:
            place: returns where, in another thread; nothing may be there yet.
            items: arrays by path, by item.
            notes: what else to keep, as JSON.
            then: what to do when it is written, in that thread.

        Returns:
            What is done when `then` is, and has the error if something failed.
        """
        with self._lock:
            self.wait()
            placed = self._staging.put(items)
            names = list(items)  # nothing may hold the arrays: the next step takes their memory

            def work() -> None:
                folder = place()
                self._ask("write", folder, placed, names, dict(notes))
                then(folder)

            return self._submit(work)

    def read_manifest(self, folder: Path) -> dict[str, Any]:
        """Returns what a checkpoint says of itself.

        Args:
            folder: of the checkpoint.

        Raises:
            DataLossError: it is damaged; and what else `stratagem.storage.read_manifest` raises.
        """
        with self._lock:
            return self._submit(lambda: self._ask("read_manifest", folder)).result()

    def read_arrays(
        self, folder: Path, manifest: Mapping[str, Any], names: Wanted
    ) -> dict[str, Arrays]:
        """Reads and checks arrays.

        Args:
            folder: of the checkpoint.
            manifest: what it says of itself.
            names: of the items; a dict names the arrays of each that are read.

        Returns:
            The arrays by path, by item, as host arrays.

        Raises:
            DataLossError: a file is missing or damaged.
        """

        def work() -> dict[str, Arrays]:
            placed = self._ask("read_arrays", folder, dict(manifest), names)
            found = self._staging.get(placed)
            return {
                name: {path: np.array(array) for path, array in found.get(name, {}).items()}
                for name in names
            }

        with self._lock:
            return self._submit(work).result()

    def wait(self) -> None:
        """Waits until nothing is being done and all is told; who asked for it hears of errors."""
        if self._last is not None:
            self._last.exception()
            # What was to be called then comes after that, and before the next one in the line.
            with contextlib.suppress(RuntimeError):  # no next one at the end of the program
                self._thread.submit(_do_nothing).result()

    def close(self) -> None:
        """Waits for what is being done, and ends the process."""
        with self._lock:
            self._thread.shutdown()
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._staging.close()

    def _submit(self, work: Callable[[], Any]) -> Future[Any]:
        self._last = self._thread.submit(work)
        return self._last

    def _ask(self, name: str, folder: Path, *arguments: Any) -> Any:
        try:
            self._connection.send((name, folder, *arguments))
            result, error = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._lost(name, folder) from error
        if error is not None:
            raise error
        return result

    def _lost(self, name: str, folder: Path) -> OSError:
        returncode = self._process.wait()
        return OSError(
            explain(
                f"The process that was to {name.replace('_', ' ')} {folder} ended with "
                f"{returncode}.",
                expected="it to go on: it is started by the first checkpoint, uses as much memory "
                "as one, and ignores signals that ask training to end.",
                fix="see whether the system was short of memory; the next checkpoint starts it "
                "anew, and earlier ones are as they were.",
            )
        )


def _do_nothing() -> None:
    pass


_processes: list[StorageProcess] = []
_making = threading.Lock()


def storage_process() -> StorageProcess:
    """Returns the one that this process has, which is started if there is none."""
    with _making:
        if _processes and not _processes[0].is_alive:
            _processes.pop().close()
        if not _processes:
            _processes.append(StorageProcess())
            atexit.register(_finish)
        return _processes[0]


def wait_for_writing() -> None:
    """Waits until nothing is being written; starts no process for it."""
    for process in _processes:
        process.wait()


def _finish() -> None:
    """At the end of the program: nothing is left half done, or untold."""
    for process in _processes:
        process.close()
    _processes.clear()
    for error in take_reported():
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _forget() -> None:
    """A forked child has no part in its parent's; it starts one of its own."""
    _processes.clear()


os.register_at_fork(after_in_child=_forget)

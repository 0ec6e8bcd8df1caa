"""Main program of the storage process.

`python -m stratagem.checkpoint.storage.process_main CONNECTION MEMORY`, both file descriptors:
serves requests until the connection closes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.process import ENDING_SIGNALS
from stratagem.checkpoint.storage.shards import ShardedWrite, write_shards
from stratagem.checkpoint.storage.staging import ArrayLocation, Staging


class StorageServer:
    """Serves requests to write one at a time until the connection closes."""

    def __init__(self, connection: Connection, staging: Staging) -> None:
        self._connection = connection
        self._staging = staging
        self._work: dict[str, Callable[..., Any]] = {
            "write": self._write,
            "write_shards": lambda folder, process_id, locations: write_shards(
                folder, process_id, staging.get(locations)
            ),
        }
        self.is_busy = False

    def serve(self) -> None:
        """Serves requests until the connection closes."""
        while True:
            try:
                name, *arguments = self._connection.recv()
                self.is_busy = True
                self._connection.send(self._answer(self._work[name], arguments))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                return
            finally:
                self.is_busy = False

    def _answer(self, function: Callable[..., Any], arguments: list[Any]) -> tuple[Any, Any]:
        try:
            return function(*arguments), None
        except Exception as error:  # noqa: BLE001 - the client raises it
            return None, error.with_traceback(None)

    def _write(
        self,
        folder: Path,
        locations: list[ArrayLocation],
        names: list[str],
        notes: Mapping[str, Any],
        sharded: ShardedWrite | None,
    ) -> None:
        found = self._staging.get(locations)
        files.write(folder, {name: found.get(name, {}) for name in names}, notes, sharded)


def _main() -> None:
    connection, memory = map(int, sys.argv[1:])
    server = StorageServer(Connection(connection), Staging(memory))
    parent = os.getppid()

    def end_if_idle(signum: int, frame: object) -> None:
        """Exits if training has exited and no request is in progress."""
        if os.getppid() != parent and not server.is_busy:
            raise SystemExit(0)

    for signum in ENDING_SIGNALS:
        signal.signal(signum, end_if_idle)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    files.warm_up()
    server.serve()


if __name__ == "__main__":
    _main()

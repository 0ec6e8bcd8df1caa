"""Append-only records of a run: one file of JSON lines for each process, written as things happen.

A line is written with one system call, so a killed process leaves at most its last line torn. Times
are those of the monotonic clock, which all processes of a machine share and which never jumps.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

__all__ = ["Recorder", "read_records"]


class Recorder:
    """Records events of this process in `folder`; after a fork, in a file of the new process."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self._pid = 0
        self._file = -1
        self._num_spans = 0
        self.client = ""

    def note(self, event: str, **fields: Any) -> None:
        """Records an event of now."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self.client = f"{self._pid}-{time.monotonic_ns()}"
            path = self._folder / f"{self.client}.jsonl"
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        line = json.dumps({"event": event, **fields, "at_s": time.monotonic()})
        os.write(self._file, line.encode() + b"\n")

    @contextlib.contextmanager
    def span(
        self, what: str, refused: tuple[type[BaseException], ...] = (), **fields: Any
    ) -> Generator[None]:
        """Records the begin and the success of a block; `refused` errors are a failure.

        After any other error, as after a kill, the outcome of the block is unknown.
        """
        self._num_spans += 1
        number = self._num_spans
        self.note("invoke", what=what, span=number, **fields)
        try:
            yield
        except refused:
            self.note("fail", span=number)
            raise
        self.note("ok", span=number)


def read_records(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the client and the fields of each event, client by client in their order."""
    for path in sorted(folder.glob("*.jsonl")):
        *lines, torn = path.read_bytes().split(b"\n")
        for line in lines:
            yield path.stem, json.loads(line)
        with contextlib.suppress(json.JSONDecodeError):
            if torn:
                yield path.stem, json.loads(torn)

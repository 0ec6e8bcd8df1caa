"""One process's file of events: opened once, each line written at once, errors reported once."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path

from stratagem.messages import explain


class EventLog:
    """A new file `NAME.jsonl` in `folder`. A forked process writes nothing.

    Lines that cannot be written are lost, with one warning.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._pid = os.getpid()
        self._has_warned = False
        self._is_torn = False
        self._descriptor = self._open(folder, name)

    def write(self, line: str) -> None:
        """Writes a line, and ends a partly written one first."""
        if self._descriptor is None or os.getpid() != self._pid:
            return
        encoded = f"{line}\n".encode()
        data = b"\n" + encoded if self._is_torn else encoded
        try:
            num_written = os.write(self._descriptor, data)
        except OSError as error:
            self._is_torn = True
            self._warn(str(error))
            return
        self._is_torn = num_written < len(data)
        if self._is_torn:
            self._warn("only part of a line was written; the disk may be full.")

    def close(self) -> None:
        """Closes the file; later lines are dropped."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open(self, folder: Path, name: str) -> int | None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Processes in different containers may have the same PID.
            for number in itertools.count(1):
                ending = "jsonl" if number == 1 else f"{number}.jsonl"
                try:
                    return os.open(folder / f"{name}.{ending}", flags, 0o644)
                except FileExistsError:
                    continue
        except OSError as error:
            self._warn(str(error))
        return None

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                explain(
                    f"Events of this run are lost: {why}",
                    expected="a run folder with room, to which this process can write.",
                    fix="check the disk and the permissions of the run folder, STRATAGEM_RUN_DIR.",
                ),
                RuntimeWarning,
                stacklevel=2,
            )

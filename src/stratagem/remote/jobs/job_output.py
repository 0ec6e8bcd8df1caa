"""What a job prints, on the screen of its client."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from stratagem.launch.tasks.output.line_buffer import LineBuffer
from stratagem.launch.tasks.output.screen import STDERR, STDOUT, Screen
from stratagem.remote.jobs.log_frames import Frame

__all__ = ["JobOutput"]

_STREAMS = {"out": STDOUT, "err": STDERR}


class JobOutput:
    """Shows what the tasks of a job print; with their names where there are several.

    One process is shown as it prints, so that progress bars move.

    Args:
        tasks: the names of the tasks, such as "worker 0"; none for one process.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._screen = Screen(tasks) if tasks else None
        self._buffers = {
            (task, stream): LineBuffer() for task in tasks for stream in _STREAMS.values()
        }

    def show(self, frame: Frame) -> None:
        """Shows one part.

        Args:
            frame: of kind "out" or "err".
        """
        stream = _STREAMS[frame.kind]
        if self._screen is None:
            target = (sys.stdout, sys.stderr)[stream]
            encoding = target.encoding or "utf-8"
            target.write(frame.text.encode(encoding, "replace").decode(encoding))
            target.flush()
            return
        buffer = self._buffers[frame.task, stream]
        self._lines(frame.task, buffer.feed(frame.text.encode(), time.monotonic()), stream)

    def show_overdue(self) -> None:
        """Shows texts that have waited too long for the end of their line."""
        now_s = time.monotonic()
        for (task, stream), buffer in self._buffers.items():
            self._lines(task, buffer.overdue(now_s), stream)

    def show_rest(self) -> None:
        """Shows texts that no end of line has come for."""
        for (task, stream), buffer in self._buffers.items():
            self._lines(task, buffer.rest(), stream)

    def _lines(self, task: str, lines: list[bytes], stream: int) -> None:
        if self._screen is not None:
            texts = [line.decode("utf-8", "replace") for line in lines]
            self._screen.show(task, texts, stream=stream)

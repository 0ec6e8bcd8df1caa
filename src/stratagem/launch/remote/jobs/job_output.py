"""Display of a job's output on the screen of its client."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from stratagem.launch.remote.jobs.log_frames import LogFrame
from stratagem.launch.tasks.output.line_buffer import LineBuffer
from stratagem.launch.tasks.output.screen import STDERR, STDOUT, Screen

_STREAMS = {"out": STDOUT, "err": STDERR}


class JobOutput:
    """Shows the output of a job's tasks, each line behind the name of its task.

    Without task names there is one process, whose output is shown unchanged, with moving progress
    bars.
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        self._screen = Screen(tasks) if tasks else None
        self._buffers = {
            (task, stream): LineBuffer() for task in tasks for stream in _STREAMS.values()
        }

    def show(self, frame: LogFrame) -> None:
        """Shows a frame of kind "out" or "err"."""
        stream = _STREAMS[frame.kind]
        if self._screen is None:
            target = (sys.stdout, sys.stderr)[stream]
            encoding = target.encoding or "utf-8"
            target.write(frame.text.encode(encoding, "replace").decode(encoding))
            target.flush()
            return
        buffer = self._buffers[frame.task, stream]
        self._show_lines(frame.task, buffer.feed(frame.text.encode(), time.monotonic()), stream)

    def show_overdue(self) -> None:
        """Shows unfinished lines that have waited too long."""
        now_s = time.monotonic()
        for (task, stream), buffer in self._buffers.items():
            self._show_lines(task, buffer.overdue(now_s), stream)

    def show_rest(self) -> None:
        """Shows all unfinished lines."""
        for (task, stream), buffer in self._buffers.items():
            self._show_lines(task, buffer.rest(), stream)

    def _show_lines(self, task: str, lines: list[bytes], stream: int) -> None:
        if self._screen is not None:
            texts = [line.decode("utf-8", "replace") for line in lines]
            self._screen.show(task, texts, stream=stream)

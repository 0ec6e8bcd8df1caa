"""Output of one task: on the screen, in a log file, and its last lines in memory."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import IO

from stratagem import settings
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.tasks.output.screen import STDERR, STDOUT, Screen

# Filter for log lines of JAX's own libraries that users cannot act on.

_FOREIGN = re.compile(
    # JAX's coordination service, about a setting that process groups need.
    r"W\d{4} \S+ +\d+ coordination_service\.cc:\d+\] .*Using experimental recoverable task feature"
    # Gloo, whenever processes connect; threads that write at once mix their lines.
    r"|\[Gloo\] Rank (\[Gloo\]|\d+ is connected to \d+ peer ranks\.)"
    r"|\d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is"
)


def is_foreign(line: str) -> bool:
    """Returns True for a line that only developers of this package need.

    Example:
        >>> is_foreign("[Gloo] Rank 1 is connected to 1 peer ranks. Expected number is : 1")
        True
    """
    return _FOREIGN.match(line) is not None


# Line buffer: splits a stream of bytes into lines.

# How long text without an end of line waits for one.
PATIENCE_S = 1.0
# Longer lines are split, so that they do not fill the memory.
_MAX_LINE_BYTES = 2**16


class LineBuffer:
    r"""Splits one stream into lines.

    A carriage return restarts the line, as on a terminal, so only the final state of a progress bar
    is a line. Text that stays unfinished for a second, such as a prompt, becomes a line, too.
    """

    def __init__(self) -> None:
        self._pending = b""
        self._since_s = 0.0
        self._is_rewritten = False

    @property
    def rewritten(self) -> bytes | None:
        """Current state of a line that is rewritten in place, such as a progress bar; or None."""
        return _visible(self._pending) if self._is_rewritten else None

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Adds bytes read at `now_s`; returns the complete lines, without their ends."""
        was_empty = not self._pending
        *complete, rest = (self._pending + data).split(b"\n")
        lines = [_visible(line) for line in complete]
        while len(rest) > _MAX_LINE_BYTES:
            lines.append(_visible(rest[:_MAX_LINE_BYTES]))
            rest = rest[_MAX_LINE_BYTES:]
        self._is_rewritten = b"\r" in rest or (self._is_rewritten and not complete)
        # Text before a carriage return is overwritten.
        self._pending = _visible(rest) + b"\r" if rest.endswith(b"\r") else _visible(rest)
        if complete or was_empty:
            self._since_s = now_s
        return lines

    def overdue(self, now_s: float) -> list[bytes]:
        """Removes and returns the pending text if it has waited too long."""
        return self.rest() if now_s - self._since_s >= PATIENCE_S else []

    def rest(self) -> list[bytes]:
        """Removes and returns the pending text, at the end of the stream."""
        line, self._pending, self._is_rewritten = _visible(self._pending), b"", False
        return [line] if line else []


def _visible(line: bytes) -> bytes:
    """Returns the final state of a line with carriage returns."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


_MAX_TAIL_LINES = 400
_MAX_TAIL_LINE_CHARS = 2000


class TaskOutput:
    """Receives the output of one task. Foreign lines go only to its `file`."""

    def __init__(self, name: str, screen: Screen | None, file: IO[bytes] | None = None) -> None:
        self._name = name
        self._screen = screen
        self._buffers = (LineBuffer(), LineBuffer())
        self._tails: tuple[collections.deque[str], ...] = tuple(
            collections.deque[str](maxlen=_MAX_TAIL_LINES) for _ in self._buffers
        )
        self._shows_foreign = bool(settings.read("foreign_lines"))
        self._file = file

    def take(self, data: bytes, now_s: float, *, stream: int) -> None:
        """Adds bytes of `STDOUT` or `STDERR`, read at `now_s`."""
        if self._file is not None:
            self._file.write(data)
        self._show(self._buffers[stream].feed(data, now_s), stream, now_s)

    def show_overdue(self, now_s: float) -> None:
        """Shows unfinished lines that have waited too long."""
        progress = None if self._screen is None else self._screen.progress
        current = b""
        for stream, buffer in enumerate(self._buffers):
            if progress is not None and buffer.rewritten is not None:
                current = buffer.rewritten
            else:
                self._show(buffer.overdue(now_s), stream, now_s)
        if progress is not None:
            progress.show(self._name, current.decode("utf-8", "replace"))
        if self._screen is not None:
            held = self._screen.tracebacks.overdue(self._name, now_s)
            self._screen.show(self._name, held, stream=STDERR)

    def show_rest(self, now_s: float) -> None:
        """Shows all unfinished lines, when the task has ended."""
        for stream, buffer in enumerate(self._buffers):
            self._show(buffer.rest(), stream, now_s)
        if self._screen is not None:
            held = self._screen.tracebacks.rest(self._name)
            self._screen.show(self._name, held, stream=STDERR)
            if self._screen.progress is not None:
                self._screen.progress.show(self._name, "")

    @property
    def is_shown(self) -> bool:
        """True if the lines are shown on the screen."""
        return self._screen is not None

    def last_lines(self) -> tuple[str, ...]:
        """Returns the last lines of stderr; without any, of stdout."""
        return tuple(self._tails[STDERR] or self._tails[STDOUT])

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()

    def _show(self, lines: list[bytes], stream: int, now_s: float) -> None:
        decoded = (line.decode("utf-8", "replace") for line in lines)
        texts = [text for text in decoded if self._shows_foreign or not is_foreign(text)]
        self._tails[stream].extend(text[:_MAX_TAIL_LINE_CHARS] for text in texts)
        if self._screen is not None:
            if stream == STDERR:
                texts = self._screen.tracebacks.pass_on(self._name, texts, now_s)
            self._screen.show(self._name, texts, stream=stream)


def open_log(plan: TaskPlan, folder: Path) -> IO[bytes]:
    """Opens the file of a task: a new one at its first start; with a heading at each restart."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plan.file_name}.log"
    restart = plan.variables["STRATAGEM_RESTART_COUNT"]
    if restart == "0":
        path.write_bytes(b"")
    else:
        with path.open("ab") as file:
            file.write(f"=== restart {restart} ===\n".encode())
    return path.open("ab", buffering=0)

"""Output of tasks: on the screen behind their names, in log files, and the last lines in memory."""

from __future__ import annotations

import collections
import errno
import html
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from rich.console import Console
from rich.text import Text

from stratagem import settings
from stratagem.launch.plan import TaskPlan
from stratagem.launch.tasks.exit_status import (
    TRACEBACK_STARTS,
    find_error_line,
)
from stratagem.logs import notebook_display, plain_text, printable

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
    """Receives the output of one task. Foreign lines go only to its `log`."""

    def __init__(self, name: str, screen: Screen | None, log: TaskLog | None = None) -> None:
        self._name = name
        self._screen = screen
        self._buffers = (LineBuffer(), LineBuffer())
        self._tails: tuple[collections.deque[str], ...] = tuple(
            collections.deque[str](maxlen=_MAX_TAIL_LINES) for _ in self._buffers
        )
        self._shows_foreign = bool(settings.read("foreign_lines"))
        self._log = log

    def take(self, data: bytes, now_s: float, *, stream: int) -> None:
        """Adds bytes of `STDOUT` or `STDERR`, read at `now_s`."""
        if self._log is not None:
            self._log.write(data)
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
        """Closes the log."""
        if self._log is not None:
            self._log.close()

    def _show(self, lines: list[bytes], stream: int, now_s: float) -> None:
        decoded = (line.decode("utf-8", "replace") for line in lines)
        texts = [text for text in decoded if self._shows_foreign or not is_foreign(text)]
        self._tails[stream].extend(text[:_MAX_TAIL_LINE_CHARS] for text in texts)
        if self._screen is not None:
            if stream == STDERR:
                texts = self._screen.tracebacks.pass_on(self._name, texts, now_s)
            self._screen.show(self._name, texts, stream=stream)


class TaskLog:
    """Log file of one task: a new one at its first start, with a heading at each restart.

    What cannot be written is lost, and `say` gets one line about it: a full disk ends no training.
    Raises OSError at the first start of a task, if the file cannot be made.
    """

    def __init__(self, plan: TaskPlan, folder: Path, say: Callable[[Iterable[str]], None]) -> None:
        self._path, self._say = folder / f"{plan.file_name}.log", say
        self._file: IO[bytes] | None = None
        self._has_warned = False
        restart = plan.variables["STRATAGEM_RESTART_COUNT"]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb" if restart == "0" else "ab", buffering=0)
        except OSError as error:
            if restart == "0":
                raise
            self._warn(error)
        if restart != "0":
            self.write(f"=== restart {restart} ===\n".encode())

    def write(self, data: bytes) -> None:
        """Writes at once what a task has printed."""
        try:
            while data and self._file is not None:
                data = data[self._file.write(data) :]  # on a disk that fills, only a part
        except OSError as error:
            self._warn(error)

    def close(self) -> None:
        """Closes the file."""
        try:
            if self._file is not None:
                self._file.close()
        except OSError as error:  # a network file system reports some errors only now
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say([f"Lines are missing in {self._path}: {error.strerror or error}."])


# Unfinished lines of tasks, such as progress bars, in one display of a notebook's cell.

# A notebook stores and sends every update.
_UPDATE_EVERY_S = 0.25


class ProgressDisplay:
    """Shows the current line of each task, and updates it in place.

    `module` is `IPython.display`. Nothing is displayed before the first line.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._handle: Any = None
        self._lines: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        self._shown_at_s = 0.0

    def show(self, name: str, line: str) -> None:
        """Sets the current line of a task; "" removes it."""
        self._lines[name] = plain_text(line)
        lines = {name: line for name, line in self._lines.items() if line}
        now_s = time.monotonic()
        is_early = now_s - self._shown_at_s < _UPDATE_EVERY_S
        if lines == self._shown or (is_early and lines):
            return
        self._shown, self._shown_at_s = lines, now_s
        content = _Lines(lines)
        if self._handle is None:
            self._handle = self._module.display(content, display_id=True)
        else:
            self._handle.update(content)


class _Lines:
    def __init__(self, lines: dict[str, str]) -> None:
        self._text = "\n".join(f"[{name}] {line}" for name, line in lines.items())

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self._text)}</pre>" if self._text else "<span></span>"


def open_progress_display() -> ProgressDisplay | None:
    """Returns a new display in the kernel of a notebook; otherwise None."""
    module = notebook_display()
    return None if module is None else ProgressDisplay(module)


# Deduplication of tracebacks that several tasks print.

_MAX_LINES = 400
_MAX_TRACEBACKS = 32
# How long the first line of a traceback waits for the rest.
_HOLD_S = 1.0


class RepeatedTracebacks:
    """Holds each traceback until it is whole; refers to another task that printed the same one."""

    def __init__(self) -> None:
        self._known: collections.deque[tuple[str, list[str]]] = collections.deque(
            maxlen=_MAX_TRACEBACKS
        )
        self._held: dict[str, list[str]] = {}
        self._since_s: dict[str, float] = {}

    def pass_on(self, task: str, lines: list[str], now_s: float) -> list[str]:
        """Adds the next lines of a task; returns those to show now."""
        shown: list[str] = []
        for line in lines:
            if line in TRACEBACK_STARTS and task not in self._held:
                self._held[task], self._since_s[task] = [], now_s
            if (held := self._held.get(task)) is None:
                shown.append(line)
                continue
            held.append(line)
            if len(held) == _MAX_LINES:
                shown += self.rest(task)
        return shown

    def overdue(self, task: str, now_s: float) -> list[str]:
        """Returns held lines that have waited too long, to show now."""
        is_due = task in self._held and now_s - self._since_s[task] >= _HOLD_S
        return self.rest(task) if is_due else []

    def rest(self, task: str) -> list[str]:
        """Returns the held lines, to show now, with a repeated traceback reduced to one line."""
        lines = self._held.pop(task, [])
        if not lines:
            return []
        end = _end_of_error(lines)
        for other, known in self._known:
            common = _length_of_match(known, lines)
            if other != task and end is not None and common >= end:
                error = f"{lines[end - 1]} (the same traceback as {other})"
                return [error, *lines[common:]]
        self._known.append((task, lines))
        return lines


def _length_of_match(first: list[str], second: list[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _end_of_error(lines: list[str]) -> int | None:
    """Returns the number of lines up to the error of the last traceback, inclusive; or None."""
    starts = [number for number, line in enumerate(lines) if line in TRACEBACK_STARTS]
    error = find_error_line(lines, starts[-1])
    return None if error is None else error + 1


STDOUT, STDERR = 0, 1

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
_LAUNCHER = "launch"


def write_text(target: TextIO, text: str) -> None:
    """Writes to stdout or stderr; characters that it cannot show become question marks."""
    encoding = target.encoding or "utf-8"
    try:
        target.write(text.encode(encoding, "replace").decode(encoding))
        target.flush()
    except OSError as error:
        # A full disk below a redirected stream costs lines, and no training.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise


class Screen:
    """Writes whole lines to stdout and stderr, behind names that are colored on a terminal.

    `progress` shows lines that are rewritten in place, in a notebook; None elsewhere.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.tracebacks = RepeatedTracebacks()
        self.progress = open_progress_display()
        self._streams: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        styles = {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}
        styles[_LAUNCHER] = "bold"
        consoles = [Console(file=stream, force_jupyter=False) for stream in self._streams]
        self._is_terminal = [console.is_terminal for console in consoles]
        self._prefixes = [
            {name: _styled(console, f"[{name}] ", style) for name, style in styles.items()}
            for console in consoles
        ]

    def show(self, name: str, lines: Iterable[str], *, stream: int = STDOUT) -> None:
        """Writes lines of a task to `STDOUT` or `STDERR`."""
        prefix = self._prefixes[stream][name]
        text = "".join(f"{prefix}{self._closed(line, stream)}\n" for line in lines)
        if text:
            write_text(self._streams[stream], text)

    def say(self, lines: Iterable[str]) -> None:
        """Writes lines of the launcher itself, to stderr."""
        self.show(_LAUNCHER, lines, stream=STDERR)

    def _closed(self, line: str, stream: int) -> str:
        """Resets the color at the end of a line, so that the next task's line does not have it."""
        if self.progress is not None:
            line = printable(line)
        return f"{line}\x1b[0m" if self._is_terminal[stream] and "\x1b[" in line else line


def _styled(console: Console, text: str, style: str) -> str:
    with console.capture() as capture:
        console.print(Text(text, style), end="", soft_wrap=True)
    return capture.get()

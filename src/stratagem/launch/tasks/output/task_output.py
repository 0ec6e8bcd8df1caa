"""What the tasks print: on the screen line by line, each with its task's name, and in files."""

from __future__ import annotations

import collections
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, TextIO

from rich.console import Console
from rich.text import Text

from stratagem import environment
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.tasks.output.foreign_lines import is_foreign
from stratagem.launch.tasks.output.line_buffer import LineSplitter
from stratagem.launch.tasks.output.repeated_tracebacks import RepeatedTracebacks

__all__ = ["STDERR", "STDOUT", "Screen", "TaskOutput"]

STDOUT, STDERR = 0, 1

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
_LAUNCHER = "launch"
_MAX_TAIL_LINES = 400
_MAX_TAIL_LINE_CHARS = 2000


class Screen:
    """Writes whole lines on this process's stdout and stderr, each behind a name.

    Names are colored where a terminal shows them. `tracebacks` are those on the screen.

    Args:
        names: the tasks.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.tracebacks = RepeatedTracebacks()
        self._streams: tuple[TextIO, TextIO] = (sys.stdout, sys.stderr)
        styles = {name: _COLORS[place % len(_COLORS)] for place, name in enumerate(names)}
        styles[_LAUNCHER] = "bold"
        consoles = [Console(file=stream) for stream in self._streams]
        self._is_terminal = [console.is_terminal for console in consoles]
        self._prefixes = [
            {name: _styled(console, f"[{name}] ", style) for name, style in styles.items()}
            for console in consoles
        ]

    def show(self, name: str, lines: Iterable[str], *, stream: int = STDOUT) -> None:
        """Writes lines of a task.

        Args:
            name: the task.
            lines: without their ends.
            stream: `STDOUT` or `STDERR`.
        """
        prefix = self._prefixes[stream][name]
        text = "".join(f"{prefix}{self._closed(line, stream)}\n" for line in lines)
        if text:
            target = self._streams[stream]
            # A terminal that cannot show a character shows a question mark.
            encoding = target.encoding or "utf-8"
            target.write(text.encode(encoding, "replace").decode(encoding))
            target.flush()

    def say(self, lines: Iterable[str]) -> None:
        """Writes lines of the launcher itself, on stderr.

        Args:
            lines: without their ends.
        """
        self.show(_LAUNCHER, lines, stream=STDERR)

    def _closed(self, line: str, stream: int) -> str:
        """A colour that a task has left on would go on in the next task's line."""
        return f"{line}\x1b[0m" if self._is_terminal[stream] and "\x1b[" in line else line


class TaskOutput:
    """Takes what one task prints, and keeps the end of it; only its file has foreign lines.

    Args:
        plan: the task.
        screen: where its lines are shown; None shows nothing.
        log_dir: folder of its file; None keeps none.
    """

    def __init__(
        self, plan: TaskPlan, screen: Screen | None, log_dir: str | os.PathLike[str] | None
    ) -> None:
        self._name = plan.name
        self._screen = screen
        self._splitters = (LineSplitter(), LineSplitter())
        self._tails: tuple[collections.deque[str], ...] = tuple(
            collections.deque[str](maxlen=_MAX_TAIL_LINES) for _ in self._splitters
        )
        self._shows_foreign = bool(environment.read("foreign_lines"))
        self._file = None if log_dir is None else _open_log(plan, Path(log_dir))

    def take(self, data: bytes, now_s: float, *, stream: int) -> None:
        """Takes what was read.

        Args:
            data: the next bytes.
            now_s: the time.
            stream: `STDOUT` or `STDERR`.
        """
        if self._file is not None:
            self._file.write(data)
        self._show(self._splitters[stream].feed(data, now_s), stream, now_s)

    def show_overdue(self, now_s: float) -> None:
        """Shows texts that have waited too long for the end of their line.

        Args:
            now_s: the time.
        """
        for stream, splitter in enumerate(self._splitters):
            self._show(splitter.overdue(now_s), stream, now_s)
        if self._screen is not None:
            held = self._screen.tracebacks.overdue(self._name, now_s)
            self._screen.show(self._name, held, stream=STDERR)

    def show_rest(self, now_s: float) -> None:
        """Shows texts that no end of line has come for, when none can come any more."""
        for stream, splitter in enumerate(self._splitters):
            self._show(splitter.rest(), stream, now_s)
        if self._screen is not None:
            held = self._screen.tracebacks.rest(self._name)
            self._screen.show(self._name, held, stream=STDERR)

    @property
    def is_shown(self) -> bool:
        """True if the lines are shown on the screen."""
        return self._screen is not None

    def last_lines(self) -> tuple[str, ...]:
        """Returns the end of what was printed.

        Returns:
            The last lines on stderr; on stdout if there are none.
        """
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


def _styled(console: Console, text: str, style: str) -> str:
    with console.capture() as capture:
        console.print(Text(text, style), end="", soft_wrap=True)
    return capture.get()


def _open_log(plan: TaskPlan, folder: Path) -> IO[bytes]:
    """A new file at the first start, and the same one with a heading at every restart."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plan.file_name}.log"
    restart = plan.variables["STRATAGEM_RESTART_COUNT"]
    if restart == "0":
        path.write_bytes(b"")
    else:
        with path.open("ab") as file:
            file.write(f"=== restart {restart} ===\n".encode())
    return path.open("ab", buffering=0)

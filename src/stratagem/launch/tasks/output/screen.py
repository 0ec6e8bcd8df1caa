"""Display of task output, each line behind the name of its task."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from rich.console import Console
from rich.text import Text

from stratagem.launch.tasks.output.progress_display import open_progress_display
from stratagem.launch.tasks.output.repeated_tracebacks import RepeatedTracebacks
from stratagem.notebooks import printable

STDOUT, STDERR = 0, 1

_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
_LAUNCHER = "launch"


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
            target = self._streams[stream]
            # Characters that the terminal cannot show become question marks.
            encoding = target.encoding or "utf-8"
            target.write(text.encode(encoding, "replace").decode(encoding))
            target.flush()

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

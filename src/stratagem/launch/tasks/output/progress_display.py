"""Unfinished lines of tasks, such as progress bars, in one display of a notebook's cell."""

from __future__ import annotations

import html
import time
from typing import Any

from stratagem.notebooks import notebook_display, plain_text

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

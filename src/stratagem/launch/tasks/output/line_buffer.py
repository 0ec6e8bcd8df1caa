"""Line buffer: splits a stream of bytes into lines."""

from __future__ import annotations

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

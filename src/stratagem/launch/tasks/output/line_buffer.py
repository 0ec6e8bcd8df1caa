"""Whole lines out of what a process writes piece by piece."""

from __future__ import annotations

__all__ = ["LineSplitter"]

# How long a text without an end of line waits for one.
PATIENCE_S = 1.0
# A text without any end of line is cut here, so that it does not fill the memory.
_MAX_LINE_BYTES = 2**16


class LineSplitter:
    r"""Cuts one stream into lines.

    A carriage return goes back to the start of the line, as on a terminal, so that of a progress
    bar only what stands there last is a line. A text that nothing has ended for a second is a line
    too: a prompt, or a bar on its way, at most once a second.

    Example:
        >>> LineSplitter().feed(b"step 1\n10%\r20%\rdone\nste", now_s=0.0)
        [b'step 1', b'done']
    """

    def __init__(self) -> None:
        self._pending = b""
        self._since_s = 0.0

    def feed(self, data: bytes, now_s: float) -> list[bytes]:
        """Takes what was read.

        Args:
            data: the next bytes of the stream.
            now_s: the time.

        Returns:
            The lines that are complete now, without their ends.
        """
        was_empty = not self._pending
        *complete, rest = (self._pending + data).split(b"\n")
        lines = [_visible(line) for line in complete]
        while len(rest) > _MAX_LINE_BYTES:
            lines.append(_visible(rest[:_MAX_LINE_BYTES]))
            rest = rest[_MAX_LINE_BYTES:]
        # What a carriage return has left behind will never be seen.
        self._pending = _visible(rest) + b"\r" if rest.endswith(b"\r") else _visible(rest)
        if complete or was_empty:
            self._since_s = now_s
        return lines

    def overdue(self, now_s: float) -> list[bytes]:
        """Gives out the text that has waited too long for the end of its line.

        Args:
            now_s: the time.

        Returns:
            That text, or nothing.
        """
        return self.rest() if now_s - self._since_s >= PATIENCE_S else []

    def rest(self) -> list[bytes]:
        """Gives out what is left when the stream has ended.

        Returns:
            The last text without an end of line, or nothing.
        """
        line, self._pending = _visible(self._pending), b""
        return [line] if line else []


def _visible(line: bytes) -> bytes:
    """What stands on the line at last."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]

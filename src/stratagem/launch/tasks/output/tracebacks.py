"""Parsing of the tracebacks that tasks print."""

from __future__ import annotations

import re
from collections.abc import Sequence

from stratagem.group.verdict import Loss

_TRACEBACK = "Traceback (most recent call last):"
# Tracebacks inside a group are indented further.
_GROUP = f"  + Exception Group {_TRACEBACK}"
TRACEBACK_STARTS = (_TRACEBACK, _GROUP)
CHAINING_LINES = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_MAX_TRACEBACK_LINES = 100
_MAX_OTHER_LINES = 20

# Errors of a task that fails because another one is gone: ours, Python's, gRPC's as JAX raises
# them, Gloo's, and the last message of JAX's client before it aborts.
_LOST_PEER = re.compile(
    r"\b(?:Unavailable|DeadlineExceeded|ConnectionReset|ConnectionAborted|ConnectionRefused|"
    r"BrokenPipe)Error\b"
    r"|\b(?:UNAVAILABLE|DEADLINE_EXCEEDED)\b"
    r"|[Cc]onnection (?:closed|reset) by peer"
    r"|another task died"
)
# Longer lines are cut, see `TaskOutput`.
_MAX_COMPARED_CHARS = 200


def failure_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the last traceback with those it is chained to, shortened, or the last lines."""
    start = _start_of_traceback(lines)
    if start is None:
        return tuple(lines[-_MAX_OTHER_LINES:])
    found = list(lines[start:])
    if len(found) > _MAX_TRACEBACK_LINES:
        half = _MAX_TRACEBACK_LINES // 2
        found[half:-half] = [f"... {len(found) - 2 * half} lines left out ..."]
    return tuple(found)


def error_lines(lines: Sequence[str], loss: Loss | None = None) -> tuple[str, ...]:
    """Returns the error and message of the last traceback, without its frames.

    That of a `loss` may contain the traceback of the lost task, which is no error of this one.

    Example:
        >>> error_lines(["step 1", "Traceback (most recent call last):", "  ...", "ValueError: 3"])
        ('ValueError: 3',)
    """
    if loss is not None:
        text = loss.message.partition("\n")[0][:_MAX_COMPARED_CHARS]
        for start in reversed(range(len(lines))):
            if text in lines[start]:
                return tuple(lines[start:])
    found = failure_lines(lines)
    if _start_of_traceback(found) is None:
        return found
    start = max(number for number, line in enumerate(found) if line in TRACEBACK_STARTS)
    error = find_error_line(found, start)
    return found if error is None else found[error:]


def find_error_line(lines: Sequence[str], start: int) -> int | None:
    """Returns the index of the unindented line that names the error of a traceback, or None."""
    indices = range(start + 1, len(lines))
    return next((n for n in indices if lines[n].strip() and not lines[n].startswith(" ")), None)


def has_lost_peer(lines: Sequence[str]) -> bool:
    """Returns True if the last error is about another task, a connection or a time limit.

    The task then probably failed because another one did.
    """
    start = _start_of_traceback(lines)
    found = lines[-_MAX_OTHER_LINES:] if start is None else lines[start:]
    # Source lines in a traceback are indented, and may mention any error.
    return any(_LOST_PEER.search(line) for line in found if start is None or line[:1] != " ")


def _start_of_traceback(lines: Sequence[str]) -> int | None:
    starts = [number for number, line in enumerate(lines) if line in TRACEBACK_STARTS]
    while len(starts) > 1 and any(
        line in CHAINING_LINES for line in lines[starts[-2] : starts[-1]]
    ):
        starts.pop()
    return starts[-1] if starts else None

"""Parsing of the tracebacks that tasks print."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

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
# First lines of the group's verdicts, see group/verdict.py.
_NAMED_LOSS = re.compile(
    r"(?:\w+\.)*(?:Unavailable|DeadlineExceeded)Error: "
    r"(chief|(?:worker|process) \d+)(?: \([^()]*\))? "
    r"(ended with an error|died|has not answered for \d+ s|has made no progress for \d+ s)"
)


@dataclasses.dataclass(frozen=True)
class LostPeer:
    """Task that an error names as lost, and the reason in words, such as "died"."""

    name: str
    how: str


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


def error_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the error and message of the last traceback, without its frames.

    Example:
        >>> error_lines(["step 1", "Traceback (most recent call last):", "  ...", "ValueError: 3"])
        ('ValueError: 3',)
    """
    if (named := _line_of_loss(lines)) is not None:
        return tuple(lines[named:])
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


def lost_peer(lines: Sequence[str]) -> LostPeer | None:
    """Returns the task whose loss the error reports, or None.

    That error may contain the traceback of the other task.
    """
    line = _line_of_loss(lines)
    match = None if line is None else _NAMED_LOSS.match(lines[line])
    if match is None:
        return None
    task, how = match.groups()
    # Workers of several nodes know only their numbers as processes, which are those of the workers.
    task = "chief 0" if task == "chief" else task.replace("process", "worker")
    return LostPeer(task, how)


def has_lost_peer(lines: Sequence[str]) -> bool:
    """Returns True if the last error is about another task, a connection or a time limit.

    The task then probably failed because another one did.
    """
    if _line_of_loss(lines) is not None:
        return True
    start = _start_of_traceback(lines)
    found = lines[-_MAX_OTHER_LINES:] if start is None else lines[start:]
    # Source lines in a traceback are indented, and may mention any error.
    return any(_LOST_PEER.search(line) for line in found if start is None or line[:1] != " ")


def _line_of_loss(lines: Sequence[str]) -> int | None:
    return next((n for n in reversed(range(len(lines))) if _NAMED_LOSS.match(lines[n])), None)


def _start_of_traceback(lines: Sequence[str]) -> int | None:
    starts = [number for number, line in enumerate(lines) if line in TRACEBACK_STARTS]
    while len(starts) > 1 and any(
        line in CHAINING_LINES for line in lines[starts[-2] : starts[-1]]
    ):
        starts.pop()
    return starts[-1] if starts else None

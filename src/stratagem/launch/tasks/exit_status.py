"""How a task ended, and what its last lines tell about it."""

from __future__ import annotations

import dataclasses
import re
import signal
from collections.abc import Sequence

from stratagem.launch.plan.devices import TRAINERS

__all__ = [
    "CHAINING_LINES",
    "TRACEBACK_STARTS",
    "TaskEnd",
    "end_of_frames",
    "error_words",
    "exit_code",
    "how_it_ended",
    "last_words",
    "lost_a_peer",
]

_TRACEBACK = "Traceback (most recent call last):"
# Those inside a group stand further to the right.
_GROUP = f"  + Exception Group {_TRACEBACK}"
TRACEBACK_STARTS = (_TRACEBACK, _GROUP)
CHAINING_LINES = (
    "The above exception was the direct cause of the following exception:",
    "During handling of the above exception, another exception occurred:",
)
_MAX_TRACEBACK_LINES = 100
_MAX_OTHER_LINES = 20

# What a task says that fails because another one has gone: our errors, Python's, those of gRPC as
# JAX passes them on, Gloo's, and the last words of JAX's client before it aborts.
_LOST_PEER = re.compile(
    r"\b(?:Unavailable|DeadlineExceeded|ConnectionReset|ConnectionAborted|ConnectionRefused|"
    r"BrokenPipe)Error\b"
    r"|\b(?:UNAVAILABLE|DEADLINE_EXCEEDED)\b"
    r"|[Cc]onnection (?:closed|reset) by peer"
    r"|another task died"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """The end of one task.

    Args:
        name: which task, "worker 2".
        returncode: its exit code; minus the number of the signal that killed it.
        at_s: when, on the clock of `time.monotonic`.
        was_stopped: it had been told to end, because another task had failed or all was done.
        signals: those that were sent to it.
        lines: the last that it printed: on stderr if anything, else on stdout.
        was_shown: they were on the screen.
    """

    name: str
    returncode: int
    at_s: float
    was_stopped: bool = False
    signals: frozenset[int] = frozenset()
    lines: tuple[str, ...] = ()
    was_shown: bool = False

    @property
    def trains(self) -> bool:
        """Whether the work is done when this task and its like have ended."""
        return self.name.partition(" ")[0] in TRAINERS

    @property
    def failed(self) -> bool:
        """Whether it ended badly by itself.

        One that was stopped may leave with any exit code, but it is not stopped by a signal that
        nobody has sent: writing a core dump takes longer than the others need to notice.
        """
        if self.was_stopped:
            return self.returncode < 0 and -self.returncode not in self.signals
        return self.returncode != 0


def exit_code(returncode: int) -> int:
    """Returns the exit code by which a shell reports an end.

    Args:
        returncode: an exit code, or minus the number of a signal.

    Returns:
        The exit code; 128 and the number of the signal.

    Example:
        >>> exit_code(3), exit_code(-9)
        (3, 137)
    """
    return returncode if returncode >= 0 else 128 - returncode


def how_it_ended(returncode: int) -> str:
    """Says it in words.

    Args:
        returncode: an exit code, or minus the number of a signal.

    Returns:
        The exit code, or the name of the signal.

    Example:
        >>> how_it_ended(3), how_it_ended(-9)
        ('exit code 3', 'killed by SIGKILL')
    """
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-returncode}"


def last_words(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns what best tells why a task ended: its last traceback, else its last lines.

    Args:
        lines: the last lines that it printed.

    Returns:
        The traceback with those that it is chained to, and what follows; in a long one the
        middle is left out. Without a traceback the last lines.

    Example:
        >>> last_words(["step 1", "Traceback (most recent call last):", "  ...", "ValueError: 3"])
        ('Traceback (most recent call last):', '  ...', 'ValueError: 3')
    """
    start = _start_of_traceback(lines)
    if start is None:
        return tuple(lines[-_MAX_OTHER_LINES:])
    words = list(lines[start:])
    if len(words) > _MAX_TRACEBACK_LINES:
        half = _MAX_TRACEBACK_LINES // 2
        words[half:-half] = [f"... {len(words) - 2 * half} lines left out ..."]
    return tuple(words)


def error_words(lines: Sequence[str]) -> tuple[str, ...]:
    """Returns the error of the last traceback with its message, without the frames.

    Example:
        >>> error_words(["step 1", "Traceback (most recent call last):", "  ...", "ValueError: 3"])
        ('ValueError: 3',)
    """
    words = last_words(lines)
    if _start_of_traceback(words) is None:
        return words
    start = max(number for number, line in enumerate(words) if line in TRACEBACK_STARTS)
    error = end_of_frames(words, start)
    return words if error is None else words[error:]


def end_of_frames(lines: Sequence[str], start: int) -> int | None:
    """Returns the place of the line that names the error of a traceback, which is not indented."""
    places = range(start + 1, len(lines))
    return next((n for n in places if lines[n].strip() and not lines[n].startswith(" ")), None)


def lost_a_peer(lines: Sequence[str]) -> bool:
    """Returns whether a task ended because of another one, as far as its last words tell.

    Args:
        lines: the last lines that it printed.

    Returns:
        True where the errors of its last traceback, or without one its last lines, name a
        connection or a time limit.

    Example:
        >>> lost_a_peer(["stratagem.errors.UnavailableError: worker 2 is gone."])
        True
    """
    start = _start_of_traceback(lines)
    words = lines[-_MAX_OTHER_LINES:] if start is None else lines[start:]
    # In a traceback source lines are indented, and may name any error.
    return any(_LOST_PEER.search(line) for line in words if start is None or line[:1] != " ")


def _start_of_traceback(lines: Sequence[str]) -> int | None:
    starts = [number for number, line in enumerate(lines) if line in TRACEBACK_STARTS]
    while len(starts) > 1 and any(
        line in CHAINING_LINES for line in lines[starts[-2] : starts[-1]]
    ):
        starts.pop()
    return starts[-1] if starts else None

"""End of a task: its exit status, the loss that it reported, and the error in its last lines."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from collections.abc import Sequence
from pathlib import Path

from stratagem.cluster.preemption.configuration import EXIT_CODE
from stratagem.group.verdict import Loss
from stratagem.launch.plan import TRAINERS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """End of one task.

    `returncode` is minus the signal's number if one killed it; `at_s` is a time of
    `time.monotonic`. `was_stopped` means that the launcher had asked it to end, `signals` are those
    sent to it. `lines` are its last of stderr, else of stdout, and `was_shown` if on the screen.
    `loss` is the record of the loss of another task that it raised as an error. `no_start` says why
    the task could not start again.
    """

    name: str
    returncode: int
    at_s: float
    was_stopped: bool = False
    signals: frozenset[int] = frozenset()
    lines: tuple[str, ...] = ()
    was_shown: bool = False
    loss: Loss | None = None
    no_start: str = ""

    @property
    def how(self) -> str:
        """The end in words, such as "exit code 3"."""
        if self.no_start:
            return f"it could not start: {self.no_start}"
        return describe_exit(self.returncode)

    @property
    def lost_peer(self) -> Loss | None:
        """The loss that made this task fail, if it has reported one."""
        return None if self.returncode in (0, EXIT_CODE) else self.loss

    @property
    def has_lost_peer(self) -> bool:
        """True if the task reports a loss, or its last error looks like the effect of one."""
        return self.lost_peer is not None or has_lost_peer(self.lines)

    @property
    def culprit(self) -> str:
        """The task whose failure this is: the lost one, if this one reports a loss."""
        return self.name if self.lost_peer is None else self.lost_peer.task

    @property
    def why(self) -> str:
        """The failure of `culprit` in words."""
        if self.lost_peer is None:
            return self.how
        return f"it {self.lost_peer.how}, as {self.name} reported ({self.how})"

    @property
    def trains(self) -> bool:
        """True for chief and workers: the job is done when these have ended."""
        return self.name.partition(" ")[0] in TRAINERS

    @property
    def failed(self) -> bool:
        """True if the task failed by itself.

        A task that was stopped may exit with any code. But a signal that was not sent to it is a
        failure: a core dump can take longer than the stop.
        """
        if self.was_stopped:
            return self.returncode < 0 and -self.returncode not in self.signals
        return self.returncode != 0


def take_loss(path: str | None) -> Loss | None:
    """Reads and removes the record of a loss that an ended task has written, if any."""
    if path is None:
        return None
    with contextlib.suppress(OSError):
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        Path(path).unlink()  # so that it is not that of the task when it has started again
        return Loss.from_json(text)
    return None


def exit_code(returncode: int) -> int:
    """Returns the exit code that a shell reports: 128 plus the number of a signal."""
    return returncode if returncode >= 0 else 128 - returncode


def describe_exit(returncode: int) -> str:
    """Returns "exit code 3" or "killed by SIGKILL", for example."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:  # real-time signals have no names
        return f"killed by signal {-returncode}"


# Parsing of the tracebacks that tasks print.

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

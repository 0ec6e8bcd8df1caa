"""Exit status of a task: how it ended, in numbers and in words."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from pathlib import Path

from stratagem.cluster.preemption.configuration import EXIT_CODE
from stratagem.group.verdict import Loss
from stratagem.launch.plan.task_plan import TRAINERS
from stratagem.launch.tasks.output.tracebacks import has_lost_peer


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitStatus:
    """End of one task.

    `returncode` is minus the signal's number if one killed it; `at_s` is a time of
    `time.monotonic`. `was_stopped` means that the launcher had asked it to end, `signals` are those
    sent to it. `lines` are its last of stderr, else of stdout, and `was_shown` if on the screen.
    `loss` is the record of the loss of another task that it raised as an error.
    """

    name: str
    returncode: int
    at_s: float
    was_stopped: bool = False
    signals: frozenset[int] = frozenset()
    lines: tuple[str, ...] = ()
    was_shown: bool = False
    loss: Loss | None = None

    @property
    def how(self) -> str:
        """The end in words, such as "exit code 3"."""
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

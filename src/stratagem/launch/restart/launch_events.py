"""What the launcher itself writes about a run; the tasks write what they do."""

from __future__ import annotations

from types import TracebackType

from stratagem.goodput import EventWriter
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import TRAINERS
from stratagem.launch.restart.policy import have_saved_and_left
from stratagem.launch.tasks.exit_status import TaskEnd, how_it_ended

__all__ = ["LaunchEvents"]


class LaunchEvents:
    """Writes events of the launcher where the run has a folder, and nothing where it has none.

    Args:
        options: of the launch.
    """

    def __init__(self, options: LaunchOptions) -> None:
        self._writer: EventWriter | None = None
        self._has_told = False
        if options.run_dir is not None:
            num_processes = sum(task_type in TRAINERS for task_type in options.task_types)
            self._writer = EventWriter(options.run_dir, "launcher", 0, num_processes=num_processes)

    def __enter__(self) -> LaunchEvents:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._writer is not None:
            if error is not None:
                self._writer.end(1, repr(error))
            self._writer.close()

    def failure(self, cause: TaskEnd) -> None:
        """Tells which task failed first, once for a start.

        Args:
            cause: that task. That it saved and left is told by the restart.
        """
        if self._writer is not None and not self._has_told and not have_saved_and_left([cause]):
            self._has_told = True
            reason = f"{cause.name} failed first: {how_it_ended(cause.returncode)}"
            self._writer.failure(reason, lost=cause.name)

    def notice(self, reason: str) -> None:
        """Tells that all is to end.

        Args:
            reason: who says so.
        """
        if self._writer is not None:
            self._writer.notice(reason)

    def restart(self, restart: int, cause: TaskEnd | None) -> None:
        """Tells that all tasks are started again.

        Args:
            restart: how often they were started before.
            cause: the task that failed first, or left; None where all were asked to leave.
        """
        self._has_told = False
        if self._writer is not None and cause is None:
            self._writer.restart(restart, "all workers start again")
        elif self._writer is not None and cause is not None:
            what = "saved and left" if have_saved_and_left([cause]) else "failed"
            how = how_it_ended(cause.returncode)
            self._writer.restart(restart, f"{cause.name} {what} ({how})")

    def end(self, code: int) -> None:
        """Tells that the launcher is done.

        Args:
            code: its exit code.
        """
        if self._writer is not None:
            self._writer.end(code)

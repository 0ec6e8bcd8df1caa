"""Launcher's events in the folder of a run: failures, notices, restarts and the end."""

from __future__ import annotations

from types import TracebackType

from stratagem.launch.plan.devices import TRAINERS
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart.policy import have_saved_and_left
from stratagem.launch.restart.slow_tasks import SlowTask
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.observe.run_events.writer import EventWriter


class LaunchEvents:
    """Records events of the launcher. Does nothing if the run has no folder."""

    def __init__(self, options: LaunchOptions) -> None:
        self._writer: EventWriter | None = None
        self._has_failed = False
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

    def failure(self, cause: ExitStatus) -> None:
        """Records the task that failed first, once per start; `restart` records saved exits."""
        if self._writer is not None and not self._has_failed and not have_saved_and_left([cause]):
            self._has_failed = True
            lost = cause.name if cause.lost_peer is None else cause.lost_peer.name
            self._writer.failure(f"{cause.culprit} failed first: {cause.why}", lost=lost)

    def notice(self, reason: str) -> None:
        """Records that all tasks have been asked to end."""
        if self._writer is not None:
            self._writer.notice(reason)

    def straggler(self, slow: SlowTask) -> None:
        """Records a task for which the others wait."""
        if self._writer is not None:
            one = slow.straggler
            self._writer.straggler(
                one.task,
                one.cause.value,
                late_s=one.late_s,
                step_s=slow.step_s,
                is_evicted=bool(slow.reason),
            )

    def restart(self, restart: int, cause: ExitStatus | None) -> None:
        """Records a restart of all tasks; `cause` is None if the launcher asked for it."""
        self._has_failed = False
        if self._writer is not None and cause is None:
            self._writer.restart(restart, "all workers start again")
        elif self._writer is not None and cause is not None:
            verb = "saved and left" if have_saved_and_left([cause]) else "failed"
            self._writer.restart(restart, f"{cause.culprit} {verb} ({cause.why})")

    def end(self, code: int) -> None:
        """Records the exit code of the launcher."""
        if self._writer is not None:
            self._writer.end(code)

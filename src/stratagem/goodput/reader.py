"""Reads the event files of a run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from stratagem.errors import NotFoundError
from stratagem.messages import explain
from stratagem.run_events.records import Event, StartEvent, decode

__all__ = ["ProcessEvents", "RunEvents", "read_run"]

_NOT_TRAINING = ("ps", "evaluator", "launcher")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEvents:
    """Events of one process in order, beginning with its start."""

    start: StartEvent
    events: tuple[Event, ...]

    @property
    def task(self) -> str:
        """The task, such as "worker 2"."""
        return f"{self.start.task_type} {self.start.task_index}"

    @property
    def trains(self) -> bool:
        """True if the process runs training steps."""
        return self.start.task_type not in _NOT_TRAINING

    def at_s(self, event: Event) -> float:
        """Converts an event's time to the shared wall clock.

        The wall clock is read only at the start, so that later adjustments have no effect.
        """
        return self.start.time_s + (event.monotonic_s - self.start.monotonic_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEvents:
    """Events of a run.

    Args:
        processes: events by process, ordered by start time.
        problems: one line per file or line that could not be read.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with sg.goodput.EventWriter(folder, "worker", 0, num_processes=1) as writer:
        ...         writer.end()
        ...     run = sg.goodput.read_run(folder)
        >>> run.processes[0].start.task_type, run.problems
        ('worker', ())

    Source: specific to Stratagem.
    """

    processes: tuple[ProcessEvents, ...]
    problems: tuple[str, ...] = ()


def read_run(run_dir: str | os.PathLike[str]) -> RunEvents:
    """Reads the events of a run.

    Args:
        run_dir: run folder, as in `STRATAGEM_RUN_DIR`.

    Returns:
        The events, with a list of unreadable files and lines.

    Raises:
        NotFoundError: the folder has no readable events.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:  # STRATAGEM_RUN_DIR of a run
        ...     with sg.goodput.EventWriter(folder, "worker", 0, num_processes=1) as writer:
        ...         writer.step(1)
        ...     run = sg.goodput.read_run(folder)
        >>> [type(event).__name__ for event in run.processes[0].events]
        ['StartEvent', 'StepEvent']

    Source: specific to Stratagem.
    """
    folder = Path(run_dir) / "events"
    paths = sorted(folder.glob("*.jsonl"))
    processes: list[ProcessEvents] = []
    problems: list[str] = []
    for path in paths:
        events = _read_events(path, problems)
        if events and isinstance(events[0], StartEvent):
            # Threads may write their events slightly out of order.
            ordered = (events[0], *sorted(events[1:], key=lambda event: event.monotonic_s))
            processes.append(ProcessEvents(start=events[0], events=ordered))
        elif events:
            problems.append(f"{path.name}: skipped, because its first event is not a start.")
    if not processes:
        raise NotFoundError(
            explain(
                " ".join([f"{run_dir} has no events.", *problems]),
                expected=f"event files {folder / '*.jsonl'} written by a run.",
                fix="pass the value of STRATAGEM_RUN_DIR during the run.",
            )
        )
    processes.sort(key=lambda process: process.start.time_s)
    return RunEvents(processes=tuple(processes), problems=tuple(problems))


def _read_events(path: Path, problems: list[str]) -> list[Event]:
    try:
        lines = path.read_bytes().decode("utf-8", "replace").split("\n")
    except OSError as error:
        problems.append(f"{path.name}: {error}")
        return []
    events: list[Event] = []
    wrong: list[str] = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            events.append(decode(line))
        except ValueError as error:
            wrong.append(f"line {number}: {str(error).splitlines()[0]}")
    if wrong:
        more = f" {len(wrong) - 1} more lines are unreadable." if len(wrong) > 1 else ""
        problems.append(f"{path.name}, {wrong[0]}{more}")
    return events

"""Reads what the processes of a run have written."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from stratagem.errors import NotFoundError
from stratagem.goodput.events import Event, StartEvent, decode
from stratagem.messages import explain

__all__ = ["ProcessEvents", "RunEvents", "read_run"]

_NOT_TRAINING = ("ps", "evaluator", "launcher")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEvents:
    """The events of one process, the start first.

    Args:
        start: its first event.
        events: all, in their order.
    """

    start: StartEvent
    events: tuple[Event, ...]

    @property
    def task(self) -> str:
        """Which task it is, "worker 2"."""
        return f"{self.start.task_type} {self.start.task_index}"

    @property
    def trains(self) -> bool:
        """Whether its steps are those of the group."""
        return self.start.task_type not in _NOT_TRAINING

    def at_s(self, event: Event) -> float:
        """Says when an event was, on the clock that machines share.

        The clock is read once, at the start: one that is set while the process runs does no harm.

        Args:
            event: one of the process.

        Returns:
            The time.
        """
        return self.start.time_s + (event.monotonic_s - self.start.monotonic_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEvents:
    """The events of a run.

    Args:
        processes: by process, in the order of their starts.
        problems: what could not be read, a line each.
    """

    processes: tuple[ProcessEvents, ...]
    problems: tuple[str, ...] = ()


def read_run(run_dir: str | os.PathLike[str]) -> RunEvents:
    """Reads the events of a run.

    Args:
        run_dir: the run's folder.

    Returns:
        The events, and what could not be read of them.

    Raises:
        NotFoundError: the folder has no events, or none that can be read.
    """
    folder = Path(run_dir) / "events"
    paths = sorted(folder.glob("*.jsonl"))
    processes: list[ProcessEvents] = []
    problems: list[str] = []
    for path in paths:
        events = _read(path, problems)
        if events and isinstance(events[0], StartEvent):
            # A thread may have written a step that ended before what another one had written.
            ordered = (events[0], *sorted(events[1:], key=lambda event: event.monotonic_s))
            processes.append(ProcessEvents(start=events[0], events=ordered))
        elif events:
            problems.append(f"{path.name}: it does not begin with a start, and is left out.")
    if not processes:
        raise NotFoundError(
            explain(
                " ".join([f"{run_dir} has no events.", *problems]),
                expected=f"files {folder / '*.jsonl'}, which a run writes.",
                fix="pass the folder that the run was given.",
            )
        )
    processes.sort(key=lambda process: process.start.time_s)
    return RunEvents(processes=tuple(processes), problems=tuple(problems))


def _read(path: Path, problems: list[str]) -> list[Event]:
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
        more = f" And {len(wrong) - 1} more such lines." if len(wrong) > 1 else ""
        problems.append(f"{path.name}, {wrong[0]}{more}")
    return events

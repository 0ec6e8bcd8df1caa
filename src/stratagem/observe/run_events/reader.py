"""Reads the event files of a run."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

from stratagem.errors import NotFoundError, explain
from stratagem.observe.run_events.records import Event, StartEvent, decode

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
    follower = RunFollower(run_dir)
    follower.poll()
    return follower.events(is_final=True)


class RunFollower:
    """Reads the events of a growing run folder; each poll reads only the new lines.

    Args:
        run_dir: run folder, which may not exist yet.
        retains_events: False to release events after the poll that returns them; `events` then has
            only the starts.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     follower = sg.goodput.RunFollower(folder)
        ...     with sg.goodput.EventWriter(folder, "worker", 0, num_processes=1) as writer:
        ...         first = len(follower.poll()[0].events)
        ...         writer.restored(20, "backup")
        ...         second = len(follower.poll()[0].events)
        >>> first, second
        (1, 1)

    Source: specific to Stratagem.
    """

    def __init__(self, run_dir: str | os.PathLike[str], *, retains_events: bool = True) -> None:
        self._run_dir, self._retains = run_dir, retains_events
        self._folder = Path(run_dir) / "events"
        self._files: dict[Path, _GrowingFile] = {}

    def poll(self) -> tuple[ProcessEvents, ...]:
        """Reads what was written since the last poll.

        Returns:
            The new events, by process with some, ordered by start.
        """
        for path in sorted(self._folder.glob("*.jsonl")):
            self._files.setdefault(path, _GrowingFile(path, retains_events=self._retains))
        news = [file.read_new() for file in self._files.values()]
        found = [one for one in news if one is not None]
        return tuple(sorted(found, key=lambda one: one.start.time_s))

    def events(self, *, is_final: bool = False) -> RunEvents:
        """Returns all events read so far.

        Args:
            is_final: True to report a last line without an end, which may still be written.

        Returns:
            The events, with a list of unreadable files and lines.

        Raises:
            NotFoundError: no readable events were found.
        """
        read = [file.process(is_final=is_final) for file in self._files.values()]
        processes = [process for process in read if process is not None]
        reported = [file.problem(is_final=is_final) for file in self._files.values()]
        problems = [problem for problem in reported if problem is not None]
        if not processes:
            raise NotFoundError(
                explain(
                    " ".join([f"{self._run_dir} has no events.", *problems]),
                    expected=f"event files {self._folder / '*.jsonl'} written by a run.",
                    fix="pass the value of STRATAGEM_RUN_DIR during the run.",
                )
            )
        processes.sort(key=lambda process: process.start.time_s)
        return RunEvents(processes=tuple(processes), problems=tuple(problems))


class _GrowingFile:
    """An event file that a process may still write."""

    def __init__(self, path: Path, *, retains_events: bool) -> None:
        self._path, self._retains = path, retains_events
        self._offset = 0
        self._rest = b""
        self._num_lines = 0
        self._events: list[Event] = []
        self._wrong: list[str] = []
        self._error: str | None = None

    def read_new(self) -> ProcessEvents | None:
        """Returns the new events; None if there are none, or if the first one is not a start."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
            self._error = None
        except OSError as error:
            self._error = f"{self._path.name}: {error}"
            return None
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        news = [event for line in lines if (event := self._decoded(line)) is not None]
        if self._retains:
            self._events += news
        elif not self._events:
            self._events += news[:1]  # the start
        return self._process_of(news)

    def process(self, *, is_final: bool) -> ProcessEvents | None:
        """Returns all events so far, in order."""
        last = self._last_line() if is_final else None
        return self._process_of([*self._events, last] if isinstance(last, Event) else self._events)

    def problem(self, *, is_final: bool) -> str | None:
        """Describes what could not be read; None without a problem."""
        if self._error is not None:
            return self._error
        wrong = list(self._wrong)
        if is_final and isinstance(last := self._last_line(), str):
            wrong.append(last)
        if wrong:
            more = f" {len(wrong) - 1} more lines are unreadable." if len(wrong) > 1 else ""
            return f"{self._path.name}, {wrong[0]}{more}"
        if self._events and not isinstance(self._events[0], StartEvent):
            return f"{self._path.name}: skipped, because its first event is not a start."
        return None

    def _process_of(self, events: list[Event]) -> ProcessEvents | None:
        start = self._events[0] if self._events else None
        if not isinstance(start, StartEvent) or not events:
            return None
        # Threads may write their events slightly out of order.
        ordered = sorted(events, key=lambda event: (event is not start, event.monotonic_s))
        return ProcessEvents(start=start, events=tuple(ordered))

    def _last_line(self) -> Event | str | None:
        """Decodes a last line without an end; None without one."""
        return _event_or_fault(self._rest, self._num_lines + 1) if self._rest else None

    def _decoded(self, line: bytes) -> Event | None:
        self._num_lines += 1
        if not line:
            return None
        event = _event_or_fault(line, self._num_lines)
        if isinstance(event, Event):
            return event
        self._wrong.append(event)
        return None


def _event_or_fault(line: bytes, number: int) -> Event | str:
    """Returns the event of a line, or the reason why it cannot be read."""
    try:
        return decode(line.decode("utf-8", "replace"))
    except ValueError as error:
        return f"line {number}: {str(error).splitlines()[0]}"

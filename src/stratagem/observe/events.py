"""Events of a run: their types, their lines of JSON, and reading the files of a run folder."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from stratagem.errors import NotFoundError, explain, invalid

FORMAT_VERSION = 1
_NOT_TRAINING = ("ps", "evaluator", "launcher")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened in a process, at `time.time` and `time.monotonic` in seconds."""

    time_s: float
    monotonic_s: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartEvent(Event):
    """A process started; the first line of every file.

    `task_type` is chief, worker, ps, evaluator, or launcher. `attempt` is the number of earlier
    starts, `num_processes` the number that train together.
    """

    task_type: str
    task_index: int
    attempt: int
    num_processes: int
    pid: int

    @property
    def task(self) -> str:
        """The task, such as "worker 2"."""
        return f"{self.task_type} {self.task_index}"

    @property
    def trains(self) -> bool:
        """True if the process runs training steps."""
        return self.task_type not in _NOT_TRAINING


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent(Event):
    """One or more consecutive steps finished; the last one at the time of the event.

    `step` counts the steps completed in the run so far, `num_steps` those in this event.
    `duration_s` is the time inside the step calls. `elapsed_s` includes gaps between them, and
    `keeping_s` of it was spent on in-memory snapshots of the state. The others are those of
    `StepWaits`, in this time; None if not measured.
    """

    step: int
    num_steps: int
    duration_s: float
    elapsed_s: float
    keeping_s: float
    waited_s: float | None = None
    idle_s: float | None = None
    input_s: float | None = None
    peers_s: float | None = None
    transfer_s: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgressEvent(Event):
    """Progress of training: `step` of `total_steps`, and the latest loss and metrics.

    `epoch` counts completed epochs, of `num_epochs`. None is unknown; a value of None is not
    finite.
    """

    step: int
    total_steps: int | None
    epoch: int | None
    num_epochs: int | None
    values: dict[str, float | None]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEvent(Event):
    """Memory of a process: resident on the host, and in use on its fullest device.

    Written every few seconds by a thread of its own, so it is also a sign of life.
    """

    host_bytes: int | None
    device_bytes: int | None
    device_limit_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveStartedEvent(Event):
    """A checkpoint is about to be written."""

    step: int
    is_asynchronous: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveEndedEvent(Event):
    """A checkpoint of step `step` was written, or failed with the error `failed`.

    `stall_s` is the time that training waited for it, `duration_s` the time from start to end.
    """

    step: int
    stall_s: float
    duration_s: float
    is_asynchronous: bool
    failed: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestoredEvent(Event):
    """The process restored the state of a step from `source`: "memory", or a path."""

    step: int
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FailureEvent(Event):
    """The process detected a failure.

    `lost` is the lost task, such as "worker 2", or None. `silence_s` is the time since its last
    sign of life, `step` the number of shared programs that it had begun, and `reported_by` the task
    that got the error; None if unknown.
    """

    reason: str
    lost: str | None
    silence_s: float | None
    step: int | None
    reported_by: str | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RestartEvent(Event):
    """The launcher restarts the tasks."""

    attempt: int
    cause: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoticeEvent(Event):
    """The process received notice that its machine will be taken away."""

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MembersEvent(Event):
    """An elastic group began, or its members changed: `num_members` of `num_expected` train.

    Each member writes it, at the end of its first step in view number `view`. `lost` and `joined`
    are tasks, such as "worker 1". `change_s` is the time until the members were connected again.
    `pause_s` is the time from the end of the step before, less `step_s`, the median time of a step;
    None without steps before.
    """

    view: int
    lost: list[str]
    joined: list[str]
    num_members: int
    num_expected: int
    change_s: float
    pause_s: float | None
    step_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EndEvent(Event):
    """The process is about to exit."""

    code: int
    reason: str | None


_KINDS: dict[str, type[Event]] = {
    "start": StartEvent,
    "step": StepEvent,
    "save_started": SaveStartedEvent,
    "save_ended": SaveEndedEvent,
    "restored": RestoredEvent,
    "failure": FailureEvent,
    "restart": RestartEvent,
    "notice": NoticeEvent,
    "end": EndEvent,
    "progress": ProgressEvent,
    "memory": MemoryEvent,
    "members": MembersEvent,
}
_KIND_OF = {event_type: kind for kind, event_type in _KINDS.items()}
_FIELDS = {one: tuple(field.name for field in dataclasses.fields(one)) for one in _KIND_OF}


def encode(event: Event) -> str:
    """Encodes an event as JSON without line breaks.

    Example:
        >>> encode(NoticeEvent(time_s=9.5, monotonic_s=2.0, reason="SIGTERM"))
        '{"version": 1, "kind": "notice", "time_s": 9.5, "monotonic_s": 2.0, "reason": "SIGTERM"}'
    """
    kind = type(event)
    fields = {name: getattr(event, name) for name in _FIELDS[kind]}
    return json.dumps({"version": FORMAT_VERSION, "kind": _KIND_OF[kind], **fields})


def decode(line: str) -> Event:
    """Decodes a line written by `encode`, ignoring unknown fields.

    Raises ValueError for a truncated line, another version or kind, or a missing field.

    Example:
        >>> decode('{"version": 1, "kind": "notice", "time_s": 9, "monotonic_s": 2, "reason": ""}')
        NoticeEvent(time_s=9, monotonic_s=2, reason='')
    """
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise _unreadable_error("it is not a complete JSON object")
    if values.get("version") != FORMAT_VERSION:
        raise _unreadable_error(f"its version is {values.get('version')!r}")
    event_type = _KINDS.get(str(values.get("kind")))
    if event_type is None:
        raise _unreadable_error(f"its kind is {values.get('kind')!r}")
    try:
        return event_type(**{name: values[name] for name in _FIELDS[event_type]})
    except KeyError as missing:
        raise _unreadable_error(f"it has no {missing}") from missing


def _unreadable_error(why: str) -> ValueError:
    return invalid(
        f"This line is not an event: {why}.",
        expected=f"JSON with version {FORMAT_VERSION} and a kind among {', '.join(_KINDS)}.",
        fix="read the file with the release that wrote it.",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessEvents:
    """Events of one process in order, beginning with its start."""

    start: StartEvent
    events: tuple[Event, ...]

    @property
    def task(self) -> str:
        """The task, such as "worker 2"."""
        return self.start.task

    @property
    def trains(self) -> bool:
        """True if the process runs training steps."""
        return self.start.trains

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
    return follower.events()


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

    def events(self) -> RunEvents:
        """Returns all events read so far. A last line without an end may still be written.

        Returns:
            The events, with a list of unreadable files and lines.

        Raises:
            NotFoundError: no readable events were found.
        """
        read = [file.process() for file in self._files.values()]
        processes = [process for process in read if process is not None]
        reported = [file.problem() for file in self._files.values()]
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

    def process(self) -> ProcessEvents | None:
        """Returns all events so far, in order."""
        return self._process_of(self._events)

    def problem(self) -> str | None:
        """Describes what could not be read; None without a problem."""
        if self._error is not None:
            return self._error
        if self._wrong:
            count = len(self._wrong) - 1
            more = f" {count} more lines are unreadable." if count else ""
            return f"{self._path.name}, {self._wrong[0]}{more}"
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

    def _decoded(self, line: bytes) -> Event | None:
        self._num_lines += 1
        if not line:
            return None
        try:
            return decode(line.decode("utf-8", "replace"))
        except ValueError as error:
            self._wrong.append(f"line {self._num_lines}: {str(error).splitlines()[0]}")
            return None

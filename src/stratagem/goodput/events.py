"""What a run tells about itself: one event is one line of JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from stratagem.messages import explain

__all__ = [
    "EndEvent",
    "Event",
    "FORMAT_VERSION",
    "FailureEvent",
    "NoticeEvent",
    "RestartEvent",
    "RestoredEvent",
    "SaveEndedEvent",
    "SaveStartedEvent",
    "StartEvent",
    "StepEvent",
    "decode",
    "encode",
]

FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """Something that happened in one process.

    Args:
        time_s: when, on the clock of `time.time`, which machines share.
        monotonic_s: when, on the clock of `time.monotonic`, which is never set back.
    """

    time_s: float
    monotonic_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartEvent(Event):
    """A process began; the first line of every file.

    Args:
        task_type: chief, worker, ps, evaluator, or launcher.
        task_index: its number among those of its type.
        attempt: how often the tasks were started before.
        num_processes: how many processes train together.
        pid: the process's number on its machine.
    """

    task_type: str
    task_index: int
    attempt: int
    num_processes: int
    pid: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepEvent(Event):
    """Steps were done, the last of them at the time of the event.

    Args:
        step: how many steps of the run are done.
        num_steps: how many of them this line is about.
        duration_s: how long the calls that did them took, together.
        elapsed_s: how long it took in all, with what lay between the calls.
        keeping_s: how long of that the state was kept in memory.
    """

    step: int
    num_steps: int
    duration_s: float
    elapsed_s: float
    keeping_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveStartedEvent(Event):
    """A checkpoint is about to be written.

    Args:
        step: how many steps were done.
        is_asynchronous: training goes on while it is written.
    """

    step: int
    is_asynchronous: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveEndedEvent(Event):
    """A checkpoint was written, or not.

    Args:
        step: how many steps were done when it was started.
        stall_s: how long training waited for it, from its start on.
        duration_s: how long it took.
        is_asynchronous: training went on while it was written.
        failed: why it was not written; None if it was.
    """

    step: int
    stall_s: float
    duration_s: float
    is_asynchronous: bool
    failed: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestoredEvent(Event):
    """The process has a saved state.

    Args:
        step: how many steps that state has seen.
        source: where it comes from: "memory", or a path.
    """

    step: int
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureEvent(Event):
    """The process learnt that something failed.

    Args:
        reason: the error, in words.
        lost: who was lost, "worker 2"; None if nobody was.
        silence_s: how long after the last sign of life; None if not known.
    """

    reason: str
    lost: str | None
    silence_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartEvent(Event):
    """Whoever starts the tasks starts them again.

    Args:
        attempt: how often they were started before.
        cause: why.
    """

    attempt: int
    cause: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoticeEvent(Event):
    """The process was told that its machine will be taken away.

    Args:
        reason: by whom or what.
    """

    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndEvent(Event):
    """The process is about to end.

    Args:
        code: its exit code.
        reason: why; None if there is nothing more to say.
    """

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
}
_KIND_OF = {event_type: kind for kind, event_type in _KINDS.items()}
_TYPES: dict[str, tuple[type[Any], ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
}
# For each kind its fields, and what their values may be.
_FIELDS = {
    event_type: {
        field.name: {one for part in str(field.type).split(" | ") for one in _TYPES[part]}
        for field in dataclasses.fields(event_type)
    }
    for event_type in _KIND_OF
}


def encode(event: Event) -> str:
    """Writes an event as a line.

    Args:
        event: of any kind.

    Returns:
        JSON without line breaks.

    Example:
        >>> encode(NoticeEvent(time_s=9.5, monotonic_s=2.0, reason="SIGTERM"))
        '{"version": 1, "kind": "notice", "time_s": 9.5, "monotonic_s": 2.0, "reason": "SIGTERM"}'
    """
    head = {"version": FORMAT_VERSION, "kind": _KIND_OF[type(event)]}
    return json.dumps(head | dataclasses.asdict(event))


def decode(line: str) -> Event:
    """Reads a line that `encode` has written.

    Args:
        line: of a file of events. Fields that this version does not know are left out.

    Returns:
        The event.

    Raises:
        ValueError: the line is torn, of another version, of no known kind, or lacks a field.

    Example:
        >>> decode('{"version": 1, "kind": "notice", "time_s": 9, "monotonic_s": 2, "reason": ""}')
        NoticeEvent(time_s=9, monotonic_s=2, reason='')
    """
    try:
        values = json.loads(line)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise _unreadable("it is not one whole JSON object")
    if values.get("version") != FORMAT_VERSION:
        raise _unreadable(f"its version is {values.get('version')!r}")
    event_type = _KINDS.get(str(values.get("kind")))
    if event_type is None:
        raise _unreadable(f"its kind is {values.get('kind')!r}")
    allowed = _FIELDS[event_type]
    for name, types in allowed.items():
        value = values.get(name)
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if name not in values or type(value) not in types or not is_finite:
            raise _unreadable(f"its {name} is {value!r}")
    return event_type(**{name: values[name] for name in allowed})


def _unreadable(why: str) -> ValueError:
    return ValueError(
        explain(
            f"This line is no event: {why}.",
            expected=f"JSON of version {FORMAT_VERSION} and a kind among {', '.join(_KINDS)}.",
            fix="read it with the release that has written it.",
        )
    )

"""Event types of a run, and their encoding as one line of JSON each."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from stratagem.errors import explain

FORMAT_VERSION = 1


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
class WarningEvent(Event):
    """A warning of Python, or a log record of level WARNING or above; each text once.

    `origin` is the file and line, or the logger.
    """

    text: str
    category: str
    origin: str


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
    sign of life; None if unknown.
    """

    reason: str
    lost: str | None
    silence_s: float | None


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
class StragglerEvent(Event):
    """The others wait for `task`, for `late_s` of each step of `step_s`.

    `cause` is input, compute or unknown.
    """

    task: str
    cause: str
    late_s: float
    step_s: float


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
    "warning": WarningEvent,
    "straggler": StragglerEvent,
    "members": MembersEvent,
}
_KIND_OF = {event_type: kind for kind, event_type in _KINDS.items()}
_TYPES: dict[str, tuple[type[Any], ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "None": (type(None),),
    "dict[str, float | None]": (dict,),
    "list[str]": (list,),
}


def _types_of(annotation: str) -> set[type[Any]]:
    parts = [annotation] if annotation in _TYPES else annotation.split(" | ")
    return {one for part in parts for one in _TYPES[part]}


# Allowed types of each field, by event type.
_FIELDS = {
    event_type: {field.name: _types_of(str(field.type)) for field in dataclasses.fields(event_type)}
    for event_type in _KIND_OF
}
# Fields that earlier releases did not write, with their defaults.
_DEFAULTS = {
    event_type: {
        field.name: field.default
        for field in dataclasses.fields(event_type)
        if field.default is not dataclasses.MISSING
    }
    for event_type in _KIND_OF
}


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

    Raises ValueError for a truncated line, another version or kind, or a missing or invalid field.

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
    allowed = _FIELDS[event_type]
    values = _DEFAULTS[event_type] | values
    for name, types in allowed.items():
        value = values.get(name)
        if name not in values or type(value) not in types or not _is_valid(value):
            raise _unreadable_error(f"its {name} is {value!r}")
    return event_type(**{name: values[name] for name in allowed})


def _is_valid(value: object) -> bool:
    """Returns False for a number that is not finite, and for other contents than declared."""
    if isinstance(value, dict):
        numbers = _TYPES["float"] + _TYPES["None"]
        return all(type(one) in numbers and _is_valid(one) for one in value.values())
    if isinstance(value, list):
        return all(isinstance(one, str) for one in value)
    return not isinstance(value, float) or math.isfinite(value)


def _unreadable_error(why: str) -> ValueError:
    return ValueError(
        explain(
            f"This line is not an event: {why}.",
            expected=f"JSON with version {FORMAT_VERSION} and a kind among {', '.join(_KINDS)}.",
            fix="read the file with the release that wrote it.",
        )
    )

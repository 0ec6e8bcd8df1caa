"""Events of a run as OpenTelemetry spans, exported through the configured provider."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.environment import load
from stratagem.observe.run_events.reader import ProcessEvents
from stratagem.observe.run_events.records import (
    EndEvent,
    Event,
    FailureEvent,
    MembersEvent,
    NoticeEvent,
    ProgressEvent,
    RestartEvent,
    RestoredEvent,
    SaveEndedEvent,
    StartEvent,
    StepEvent,
    StragglerEvent,
    WarningEvent,
)

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider


_NEEDS = {"needed_by": "The export to OpenTelemetry", "install": "'stratagem[observe]'"}
_NAMES: dict[type[Event], str] = {
    StartEvent: "process started",
    SaveEndedEvent: "checkpoint",
    RestoredEvent: "restored",
    FailureEvent: "failure",
    RestartEvent: "restart",
    NoticeEvent: "preemption notice",
    StragglerEvent: "slow worker",
    MembersEvent: "members",
    WarningEvent: "warning",
    ProgressEvent: "progress",
    EndEvent: "process ended",
}


class SpanExport:
    """Ends one span per event.

    Checkpoints, start-ups, and pauses for a change of members have a length, others are moments.
    All spans of a run folder are in one trace, whose number is a hash of the folder's path. Lines
    of steps and memory are left out: they are metrics. `provider` is a tracer provider; None takes
    the global one, which environment variables or the program configure.
    """

    def __init__(self, run_dir: str | os.PathLike[str], provider: TracerProvider | None = None):
        trace: Any = load("opentelemetry.trace", **_NEEDS)
        self._trace = trace
        self._tracer = trace.get_tracer("stratagem", tracer_provider=provider)
        name = str(Path(run_dir).absolute())
        digest = hashlib.sha256(name.encode()).digest()
        run = trace.SpanContext(
            trace_id=int.from_bytes(digest[:16], "big"),
            span_id=int.from_bytes(digest[16:24], "big"),
            is_remote=True,
            trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED),
        )
        self._context = trace.set_span_in_context(trace.NonRecordingSpan(run))
        self._run_dir = name
        self._started: set[StartEvent] = set()

    def add(self, news: ProcessEvents) -> None:
        """Exports the new events of a process."""
        for event in news.events:
            at_s = news.at_s(event)
            attributes = dict(_attributes(event))
            if isinstance(event, StepEvent):
                self._add_first_step(news, event, at_s)
            elif type(event) in _NAMES:
                begin_s = at_s
                if isinstance(event, SaveEndedEvent):
                    begin_s -= max(0.0, event.duration_s)
                elif isinstance(event, MembersEvent):
                    begin_s -= max(0.0, event.pause_s or 0.0)
                is_error = (
                    isinstance(event, FailureEvent)
                    or (isinstance(event, EndEvent) and event.code != 0)
                    or (isinstance(event, SaveEndedEvent) and event.failed is not None)
                )
                name = _NAMES[type(event)]
                self._span(news, name, begin_s, at_s, attributes, is_error=is_error)

    def _add_first_step(self, news: ProcessEvents, event: StepEvent, at_s: float) -> None:
        if news.start not in self._started:
            self._started.add(news.start)
            values = {"stratagem.step": event.step}
            self._span(news, "start-up", news.start.time_s, at_s, values, is_error=False)

    def _span(
        self,
        news: ProcessEvents,
        name: str,
        begin_s: float,
        end_s: float,
        attributes: Mapping[str, str | int | float | bool],
        *,
        is_error: bool,
    ) -> None:
        shared = {
            "stratagem.run_dir": self._run_dir,
            "stratagem.process": news.task,
            "stratagem.attempt": news.start.attempt,
        }
        span = self._tracer.start_span(
            name,
            context=self._context,
            start_time=_nanoseconds(begin_s),
            attributes={**shared, **attributes},
        )
        if is_error:
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        span.end(end_time=_nanoseconds(end_s))


def _nanoseconds(time_s: float) -> int:
    return int(time_s * 1e9)


def _attributes(event: Event) -> Iterator[tuple[str, str | int | float | bool]]:
    """Yields the fields of an event that are known; metrics by name."""
    for field in dataclasses.fields(event):
        name, value = field.name, getattr(event, field.name)
        if isinstance(value, dict):
            for key, number in value.items():
                if number is not None:
                    yield f"stratagem.values.{key}", number
        elif isinstance(value, list):
            if value:
                yield f"stratagem.{name}", ", ".join(value)
        elif value is not None and name not in ("time_s", "monotonic_s"):
            yield f"stratagem.{name}", value

"""Traces in XLA's format, from events given in nanoseconds."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from jax.profiler import ProfileData

Events = Sequence["Event"]


@dataclasses.dataclass(frozen=True)
class Event:
    name: str
    begin_ns: int
    end_ns: int
    stats: Mapping[str, object] = dataclasses.field(default_factory=dict)


def xspace(planes: Mapping[str, Mapping[str, Events]]) -> bytes:
    """Returns the content of an .xplane.pb file, of events by plane and line."""
    text = "\n".join(_plane(name, lines) for name, lines in planes.items())
    return ProfileData.text_proto_to_serialized_xspace(text)


def write(path: Path, content: bytes, operations: object = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    if operations is not None:
        path.with_name("operations.json").write_text(json.dumps({"programs": operations}))
    return path


def _plane(name: str, lines: Mapping[str, Events]) -> str:
    events = [event for several in lines.values() for event in several]
    names = {name: number for number, name in enumerate({event.name for event in events}, 1)}
    keys = {key: number for number, key in enumerate({k for e in events for k in e.stats}, 1)}
    parts = [f"name: {json.dumps(name)}"]
    for line, several in lines.items():
        written = " ".join(_event(event, names, keys) for event in several)
        parts.append(f"lines {{ name: {json.dumps(line)} {written} }}")
    for field, ids in (("event_metadata", names), ("stat_metadata", keys)):
        parts += [
            f"{field} {{ key: {number} value {{ id: {number} name: {json.dumps(one)} }} }}"
            for one, number in ids.items()
        ]
    return f"planes {{ {' '.join(parts)} }}"


def _event(event: Event, names: Mapping[str, int], keys: Mapping[str, int]) -> str:
    stats = ""
    for key, value in event.stats.items():
        field = "int64_value" if isinstance(value, int) else "str_value"
        stats += f" stats {{ metadata_id: {keys[key]} {field}: {json.dumps(value)} }}"
    return (
        f"events {{ metadata_id: {names[event.name]} offset_ps: {event.begin_ns * 1000} "
        f"duration_ps: {(event.end_ns - event.begin_ns) * 1000}{stats} }}"
    )


_numbers = itertools.count(1)


def cpu_operation(
    name: str, begin_ns: int, end_ns: int, *, device: int = 0, run: int = 1, returns_ns: int = 0
) -> list[Event]:
    """Returns an operation of XLA:CPU; the call of an asynchronous one returns before its end."""
    number = next(_numbers)
    stats = {
        "hlo_op": name,
        "hlo_module": "jit_step",
        "run_id": run,
        "device_ordinal": device,
        "_p": number,
    }
    return [
        Event(name, begin_ns, returns_ns or end_ns, stats),
        Event(f"end: {name}", end_ns, end_ns, {"_c": number}),
    ]


def step(begin_ns: int, end_ns: int, num_steps: int = 1) -> Event:
    stats = {"_r": 1, "step_num": 0, "num_steps": num_steps}
    return Event("stratagem step", begin_ns, end_ns, stats)


def input_wait(begin_ns: int, end_ns: int) -> Event:
    return Event("stratagem input", begin_ns, end_ns)


def end_mark(at_ns: int) -> Event:
    return Event("stratagem end", at_ns, at_ns)


def cpu_trace(python: Sequence[Event], *operations: Sequence[Event]) -> bytes:
    """Returns a trace of a host with marks, and operations on threads of a pool."""
    lines = {"python": python}
    for number, several in enumerate(operations):
        lines[f"tf_XLAEigen/{number}"] = several
    return xspace({"/host:CPU": lines, "/host:metadata": {}})


def two_steps() -> bytes:
    """Returns a trace of two steps of 1000 ns on two CPU devices.

    Device 0 computes 1100 ns, of which 100 hide a collective of 300. Device 1 computes 1200 ns, of
    which 100 hide a collective of 400.
    """
    first = [
        *cpu_operation("dot", 200, 600, run=1),
        *cpu_operation("all-reduce", 500, 800, run=1),
        *cpu_operation("dot", 1100, 1800, run=2, returns_ns=1150),
    ]
    second = [
        *cpu_operation("dot", 200, 800, device=1, run=1),
        *cpu_operation("dot", 1100, 1700, device=1, run=2),
        *cpu_operation("all-reduce", 1600, 2000, device=1, run=2),
    ]
    python = [
        step(0, 150),
        input_wait(150, 250),
        step(1000, 1050),
        input_wait(850, 950),
        end_mark(1900),
    ]
    return cpu_trace(python, first, second)


OPERATIONS = {
    "jit_step": {
        "dot": ["dot", "jit(step)/transpose(jvp(model))/dense/dot_general"],
        "all-reduce": ["all-reduce", "jit(step)/psum"],
    }
}

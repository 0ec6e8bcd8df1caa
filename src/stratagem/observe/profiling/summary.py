"""Shares of the time of profiled steps, and the longest operations, as data and as tables."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.observe.profiling.trace import (
    DeviceOperation,
    DeviceTrace,
    Interval,
    clip,
    intersect,
    is_collective,
    length,
    subtract,
    union,
)

# Layers of a model in the metadata of compiled operations.
#
# Keras names a scope after each layer, loss and optimizer. JAX writes the scopes into the metadata
# of
# an operation, wrapped by its transformations: `jit(step)/transpose(jvp(model))/dense/dot_general`
# is a part of the backward pass of the layer `dense`.
#
# What a step does every few steps only has a scope that says so.

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^ +(?:ROOT )?%([\w.-]+) = (?:\(.*?\)|\S+) ([a-z][\w-]*)\(")
_CALLED = re.compile(r"calls=%([\w.-]+)")
_SCOPE = re.compile(r'op_name="([^"]*)"')
_PERIOD = re.compile(r"\bsynchronized_every_(\d+)_steps\b")
_WRAPPER = re.compile(r"^(\w+)\((.*)\)$")
_FUNCTIONS = {"jit", "pjit", "pmap"}
# Scopes that JAX adds for its own transformations, and our shape of a step.
_STRUCTURE = {
    "body",
    "checkpoint",
    "closed_call",
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat",
    "rematted_computation",
    "scan",
    "shard_map",
    "while",
}


def every_steps(period: int) -> AbstractContextManager[object]:
    """Returns a scope for operations of one in `period` steps."""
    return jax.named_scope(f"synchronized_every_{period}_steps")


def period_of(text: str) -> int:
    """Returns how many steps there are to one that does what an instruction says.

    Example:
        >>> period_of('op_name="jit(step)/synchronized_every_50_steps/cond"'), period_of("ROOT %a")
        (50, 1)
    """
    found = _PERIOD.search(text)
    return int(found[1]) if found else 1


def layer_of(scope: str) -> tuple[str, str]:
    """Returns the layers in a scope, joined by "/", and the pass: "forward", "backward" or "".

    Example:
        >>> layer_of("jit(_one_step)/shard_map/transpose(jvp(model))/dense/dot_general")
        ('model/dense', 'backward')
    """
    layers: list[str] = []
    wrappers: set[str] = set()
    # The last part is the primitive, except in the name of an argument.
    for part in scope.split("/")[:-1]:
        name, own = part, set[str]()
        while wrapped := _WRAPPER.match(name):
            own.add(wrapped[1])
            name = wrapped[2]
        wrappers |= own
        if name and not own & _FUNCTIONS and name not in _STRUCTURE and "(" not in name:
            layers.append(name)
    is_differentiated = "jvp" in wrappers
    phase = "backward" if "transpose" in wrappers else "forward" if is_differentiated else ""
    return "/".join(layers), phase


def instructions_of(text: str) -> dict[str, tuple[str, str]]:
    """Returns the kind of operation and the scope of each instruction of a compiled program."""
    found: dict[str, tuple[str, str]] = {}
    inside: dict[str, Counter[str]] = {}
    calls: dict[str, str] = {}
    current: Counter[str] = Counter()
    for line in text.splitlines():
        if begin := _COMPUTATION.match(line):
            current = inside.setdefault(begin[1], Counter())
        elif instruction := _INSTRUCTION.match(line):
            scope = _SCOPE.search(line)
            found[instruction[1]] = (instruction[2], scope[1] if scope else "")
            if scope and "/" in scope[1]:
                current[scope[1]] += 1
            if not scope and (called := _CALLED.search(line)):
                calls[instruction[1]] = called[1]
    for name, computation in calls.items():  # a fusion without a scope of its own
        if common := inside.get(computation, Counter()).most_common(1):
            found[name] = (found[name][0], common[0][0])
    return found


PARTS = ("compute", "collectives", "copies", "launch", "input", "compilation", "host")

_NS = 1e-9
# A smaller share of waiting for input is not worth a word.
_MOST_INPUT = 0.1
_OUTER = ("while", "conditional", "cond", "call")
# Longer gaps between operations of one program end its execution, if the trace lists none.
_LONGEST_LAUNCH_NS = 50e3

# Kind of operation and scope of each instruction, by program.
Instructions = Mapping[str, Mapping[str, tuple[str, str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfiledOperation:
    """An operation of a compiled program, summed over a profile.

    Args:
        name: name of the instruction, such as "fusion.12".
        program: name of the program.
        layer: layers that it belongs to, such as "model/dense"; "" if unknown.
        phase: "forward", "backward", or "" for neither, as in an optimizer's update.
        kind: "compute", "collective" or "copy".
        count: number of executions on one device.
        time_s: seconds on one device; operations that overlap count in full.

    Example:
        >>> one = sg.profiling.ProfiledOperation(
        ...     name="dot.2", program="jit_step", layer="model/dense", phase="backward",
        ...     kind="compute", count=10, time_s=0.02)
        >>> one.time_s / one.count
        0.002

    Source: specific to Stratagem.
    """

    name: str
    program: str
    layer: str
    phase: str
    kind: str
    count: float
    time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """Shares of the wall time of profiled steps, as a mean over the devices of one process.

    Args:
        platform: "cpu", "gpu" or "tpu".
        num_devices: number of devices in the trace.
        num_steps: number of training steps; 0 if the trace has no marks of steps.
        whole_s: seconds from the start of the first step to the end of the last one.
        parts_s: seconds of each of `PARTS`, which sum to `whole_s`. Each moment counts for the
            first that applies: a device computes, waits for a collective, or copies; is between two
            operations of a program ("launch"); or is idle while the host works on input, compiles,
            or does something else ("host").
        collectives_s: seconds in which a collective is in progress, with or without compute.
        operations: all operations, longest first.
        processor_s: processor time of this process and those that it started, in these steps; None
            if it was not measured.
        num_cores: cores that this process may use; None if they are unknown.

    Example:
        >>> summary = sg.profiling.ProfileSummary(
        ...     platform="gpu", num_devices=8, num_steps=10, whole_s=0.5, collectives_s=0.2,
        ...     parts_s={"compute": 0.3, "collectives": 0.05, "copies": 0.0, "launch": 0.05,
        ...              "input": 0.06, "compilation": 0.0, "host": 0.04}, operations=())
        >>> summary.step_s, round(summary.share("input"), 2), round(summary.busy_share, 2)
        (0.05, 0.12, 0.7)

    Source: specific to Stratagem.
    """

    platform: str
    num_devices: int
    num_steps: int
    whole_s: float
    parts_s: dict[str, float]
    collectives_s: float
    operations: tuple[ProfiledOperation, ...]
    processor_s: float | None = None
    num_cores: float | None = None

    @property
    def step_s(self) -> float:
        """Seconds of a step; all seconds if the number of steps is unknown."""
        return self.whole_s / (self.num_steps or 1)

    def share(self, part: str) -> float:
        """Returns a part's share of the time.

        Args:
            part: one of `PARTS`.

        Returns:
            A share from 0 to 1.
        """
        return self.parts_s[part] / self.whole_s if self.whole_s else 0.0

    @property
    def busy_share(self) -> float:
        """Share of the time in which a device runs an operation."""
        return sum(self.share(part) for part in ("compute", "collectives", "copies"))

    @property
    def is_input_bound(self) -> bool:
        """True if the devices wait for batches in more than a tenth of the time."""
        return self.share("input") > _MOST_INPUT

    @property
    def needed_cores(self) -> float | None:
        """Cores with which the host does the same work without letting the devices wait for input.

        None if the processor time was not measured. If this process may use as many, it does not
        use them: the input reads in too few threads or processes, or waits for a disk or a network.
        """
        others_s = self.whole_s - self.parts_s["input"]
        return self.processor_s / others_s if self.processor_s is not None and others_s else None

    @property
    def overlapped_share(self) -> float:
        """Share of the time of collectives that compute hides; 0 without collectives."""
        exposed_s = self.parts_s["collectives"]
        return 1 - exposed_s / self.collectives_s if self.collectives_s else 0.0

    def to_dict(self, top: int | None = None) -> dict[str, Any]:
        """Returns the summary as numbers, strings, lists and dicts, ready for JSON.

        Args:
            top: number of operations; None for all.

        Returns:
            The fields, with the properties.
        """
        fields = dataclasses.asdict(self) | {
            "step_s": self.step_s,
            "busy_share": self.busy_share,
            "overlapped_share": self.overlapped_share,
            "is_input_bound": self.is_input_bound,
            "needed_cores": self.needed_cores,
        }
        fields["operations"] = [dataclasses.asdict(one) for one in self.operations[:top]]
        return fields


def summarize(trace: DeviceTrace, instructions: Instructions | None = None) -> ProfileSummary:
    """Summarizes a trace that has operations; `instructions` describe those of its programs."""
    instructions = instructions or {}
    window = _window(trace)
    devices = {
        name: [_with_kind(one, instructions) for one in _innermost(operations, instructions)]
        for name, operations in trace.devices.items()
    }
    parts = [
        _parts(_inside(operations, window), trace.executions.get(name), trace, window)
        for name, operations in devices.items()
    ]
    num_devices = len(parts)
    mean = {part: sum(one[part] for one in parts) / num_devices * _NS for part in parts[0]}
    collectives_s = mean.pop("all collectives")
    begin_ns, end_ns = window
    return ProfileSummary(
        platform=trace.platform,
        num_devices=num_devices,
        num_steps=sum(count for (begin, _), count in trace.steps if begin < end_ns),
        whole_s=(end_ns - begin_ns) * _NS,
        parts_s=mean,
        collectives_s=collectives_s,
        operations=_operations(devices, window, instructions),
    )


def _window(trace: DeviceTrace) -> Interval:
    """Returns the first step's start, and the end of the last one on the host and the devices."""
    operations = [one for several in trace.devices.values() for one in several]
    last_ns = max(one.end_ns for one in operations)
    if not trace.steps:
        return min(one.begin_ns for one in operations), last_ns
    begin_ns = trace.steps[0][0][0]
    return begin_ns, max(last_ns, trace.end_ns or max(end for (_, end), _ in trace.steps))


def _innermost(
    operations: Sequence[DeviceOperation], instructions: Instructions
) -> list[DeviceOperation]:
    """Leaves out loops, branches and calls that have operations inside."""
    ordered = sorted(operations, key=lambda one: (one.begin_ns, -one.end_ns))
    kept: list[DeviceOperation] = []
    next_ns = math.inf
    for one in reversed(ordered):
        kind, _ = instructions.get(one.module, {}).get(one.name, ("", ""))
        if (kind or one.name.split(".", 1)[0]) in _OUTER and next_ns < one.end_ns:
            continue
        kept.append(one)
        next_ns = one.begin_ns
    return kept[::-1]


def _with_kind(one: DeviceOperation, instructions: Instructions) -> DeviceOperation:
    """Recognizes a collective by its kind of instruction, whatever its name."""
    kind, _ = instructions.get(one.module, {}).get(one.name, ("", ""))
    return dataclasses.replace(one, kind="collective") if is_collective(kind) else one


def _inside(operations: Sequence[DeviceOperation], window: Interval) -> list[DeviceOperation]:
    return [one for one in operations if one.end_ns > window[0] and one.begin_ns < window[1]]


def _parts(
    operations: Sequence[DeviceOperation],
    executions: Sequence[Interval] | None,
    trace: DeviceTrace,
    window: Interval,
) -> dict[str, float]:
    """Returns nanoseconds of each part on one device, and of all collectives."""

    def of_kind(kind: str) -> list[Interval]:
        return clip(union(one.interval for one in operations if one.kind == kind), window)

    collectives = of_kind("collective")
    rest, parts = [window], dict[str, float]()
    for name, taken in (
        ("compute", of_kind("compute")),
        ("collectives", collectives),
        ("copies", of_kind("copy")),
        ("launch", executions or _executions(operations)),
        ("input", trace.input),
        ("compilation", trace.compilation),
    ):
        parts[name] = length(intersect(rest, taken))
        rest = subtract(rest, taken)
    return parts | {"host": length(rest), "all collectives": length(collectives)}


def _executions(operations: Sequence[DeviceOperation]) -> list[Interval]:
    """Returns the intervals in which a program ran, from its first operation to its last."""
    if any(one.run is not None for one in operations):
        runs: dict[Any, list[Interval]] = defaultdict(list)
        for one in operations:
            runs[one.module, one.run].append(one.interval)
        return union((min(run)[0], max(end for _, end in run)) for run in runs.values())
    by_program: dict[str, list[Interval]] = defaultdict(list)
    for one in operations:
        if one.module:
            by_program[one.module].append(one.interval)
    gaps: list[Interval] = []
    for intervals in by_program.values():
        merged = union(intervals)
        for (_, end), (begin, _) in itertools.pairwise(merged):
            if begin - end <= _LONGEST_LAUNCH_NS:
                gaps.append((end, begin))
    return union(gaps)


def _operations(
    devices: Mapping[str, Sequence[DeviceOperation]], window: Interval, instructions: Instructions
) -> tuple[ProfiledOperation, ...]:
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for operations in devices.values():
        for one in _inside(operations, window):
            times[one.module, one.name, one.kind].append(one.end_ns - one.begin_ns)
    found: list[ProfiledOperation] = []
    for (module, name, kind), durations in times.items():
        _, scope = instructions.get(module, {}).get(name, ("", ""))
        layer, phase = layer_of(scope)
        found.append(
            ProfiledOperation(
                name=name,
                program=module,
                layer=layer,
                phase=phase,
                kind=kind,
                count=len(durations) / len(devices),
                time_s=sum(durations) / len(devices) * _NS,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.time_s, one.name)))


# Tables of a profile, for the terminal.


_MEANINGS = {
    "compute": "devices compute",
    "collectives": "devices exchange data or wait for others",
    "copies": "devices wait for copies from or to the host",
    "launch": "devices are between two operations",
    "input": "devices idle, the host loads a batch",
    "compilation": "devices idle, the host compiles",
    "host": "devices idle, the host does other work",
}


def show_profile(
    summary: ProfileSummary, title: str, *, top: int = 10, console: Console | None = None
) -> None:
    """Prints the shares of a profile and its `top` longest operations."""
    console = console or Console(highlight=False)
    devices = "device" if summary.num_devices == 1 else "devices"
    steps = f"{summary.num_steps} steps of {_ms(summary.step_s)}"
    whole = steps if summary.num_steps else f"{_ms(summary.whole_s)}, without marks of steps"
    busy = f"busy {summary.busy_share:.0%}"
    on = f"{summary.num_devices} {summary.platform.upper()} {devices}"
    console.print(Text(f"{title}: {whole}, {on}, {busy}"), style="bold", soft_wrap=True)
    console.print(_parts_table(summary))
    if summary.collectives_s:
        each_s = summary.collectives_s / (summary.num_steps or 1)
        text = f"Collectives take {_ms(each_s)}; compute hides {summary.overlapped_share:.0%}."
        console.print(Text(text))
    if summary.is_input_bound:
        console.print(Text(_input_verdict(summary)))
    if top:
        console.print(_operations_table(summary, top))


def _input_verdict(summary: ProfileSummary) -> str:
    """Says that the input is the limit, and if more cores would help."""
    verdict = f"Input-bound: the devices wait {summary.share('input'):.0%} of the time for batches"
    needed, has = summary.needed_cores, summary.num_cores
    if needed is None or has is None:
        return f"{verdict}."
    if needed > has:
        return f"{verdict}. The host needs {needed:.1f} cores, and has {has:g}."
    return (
        f"{verdict}. The host needs {needed:.1f} of its {has:g} cores: read in more threads or "
        "processes, unless it waits for a disk or a network."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _parts_table(summary: ProfileSummary) -> Table:
    table = Table(title="Time of a step" if summary.num_steps else "Time", title_justify="left")
    table.add_column("part", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("meaning")
    for part, seconds in summary.parts_s.items():
        if seconds or part in ("compute", "collectives", "input", "host"):
            each_s = seconds / (summary.num_steps or 1)
            table.add_row(part, f"{summary.share(part):.1%}", _ms(each_s), _MEANINGS[part])
    return table


def _operations_table(summary: ProfileSummary, top: int) -> Table:
    table = Table(title="Longest operations", title_justify="left")
    table.add_column("operation", overflow="ellipsis", no_wrap=True, max_width=30)
    table.add_column("layer", overflow="fold")
    table.add_column("pass", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    for one in summary.operations[:top]:
        table.add_row(
            one.name,
            one.layer or "-",
            one.phase or "-",
            _ms(one.time_s / (summary.num_steps or 1)),
            f"{one.time_s / summary.whole_s:.1%}" if summary.whole_s else "-",
        )
    return table

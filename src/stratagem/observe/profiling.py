"""Profiles of training steps: shares of their time, and the longest operations by layer.

A trace is what JAX's profiler wrote. Names of planes, lines and statistics are from XLA:
`tsl/profiler/utils/xplane_schema.cc`. On CPU, a thread of the host starts an operation, and the
event "end: NAME" with the same identifier ends it (`backends/cpu/runtime/thunk_executor.cc`). On
GPU, each stream is a line of the device (`backends/profiler/gpu/cupti_collector.cc`). On TPU, the
operations are on the line "XLA Ops".
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.errors import explain, invalid
from stratagem.observe.hlo import computations_of
from stratagem.observe.terminal import table_of

__all__ = ["ProfileSummary", "read_profile"]

# Names of this library's marks in a trace.

STEP = "stratagem step"
INPUT = "stratagem input"
END = "stratagem end"

# Layers of a model in the metadata of compiled operations.
#
# Keras names a scope after each layer, loss and optimizer. JAX writes the scopes into the metadata
# of an operation, wrapped by its transformations: `jit(step)/transpose(jvp(model))/dense/
# dot_general` is a part of the backward pass of the layer `dense`.
#
# What a step does every few steps only has a scope that says so.

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
    computations, _ = computations_of(text)
    inside = {
        name: Counter(one.scope for one in body.values() if "/" in one.scope)
        for name, body in computations.items()
    }
    found: dict[str, tuple[str, str]] = {}
    for one in (one for body in computations.values() for one in body.values()):
        scope = one.scope
        if not scope and "calls=" in one.line:  # a fusion has the most common scope inside
            common = inside.get(one.called[0], Counter()).most_common(1)
            scope = common[0][0] if common else ""
        found[one.name] = one.operation, scope
    return found


# Operations of devices and marks of the host in a trace.

_HOST = "/host:CPU"
_DEVICE = re.compile(r"^/device:(GPU|TPU):(\d+)$")
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute|collective-broadcast"
    r"|send|recv|nccl|psum)",
    re.IGNORECASE,
)
_COPIES = ("MemcpyH2D", "MemcpyD2H", "MemcpyP2P")
# Statistics of events that CUPTI lists on a stream for its bookkeeping of memory; they take no time
# of the device.
_NO_WORK = {
    "memalloc_details",
    "memfree_details",
    "memory_residency_details",
}

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOperation:
    """An operation that a device ran.

    `kind` is "compute", "collective", or "copy" for a copy between the memories of the host and of
    devices.
    """

    name: str
    module: str
    begin_ns: float
    end_ns: float
    kind: str = "compute"


@dataclasses.dataclass
class DeviceTrace:
    """Operations and marks of a trace; times are in nanoseconds.

    `devices` maps "cpu:0" to operations. `steps` are the host's calls with their number of steps,
    and `input` is its work on batches. `end_ns` is the end of the profiled steps on the host.
    """

    platform: str = "cpu"
    devices: dict[str, list[DeviceOperation]] = dataclasses.field(default_factory=dict)
    steps: list[tuple[Interval, int]] = dataclasses.field(default_factory=list)
    input: list[Interval] = dataclasses.field(default_factory=list)
    end_ns: float | None = None


def is_collective(name: str) -> bool:
    """Returns True for the name or the kind of an operation that exchanges data."""
    return _COLLECTIVE.match(name) is not None


def read_trace(path: Path) -> DeviceTrace:
    """Reads an `.xplane.pb` file; raises ValueError if it is not one, or lists no operations."""
    problem, trace = "lists no operations of a device", DeviceTrace()
    try:
        trace = parse_trace(ProfileData.from_serialized_xspace(path.read_bytes()))
    except RuntimeError as error:
        problem = f"cannot be read as a trace ({error})"
    if not any(trace.devices.values()):
        raise invalid(
            f"{path} {problem}.",
            expected="an .xplane.pb file as jax.profiler writes it of a compiled program that "
            "ran on a CPU, GPU or TPU.",
            fix="profile again: the file may be incomplete. With ProfileOptions of your own, "
            "leave host_tracer_level at 2.",
        )
    return trace


def parse_trace(data: Any) -> DeviceTrace:
    """Collects what a `ProfileData` has; operations of an accelerator replace those of its host."""
    trace = DeviceTrace()
    with warnings.catch_warnings():
        # Types of the profile have no module, which Python 3.13 warns about.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = {plane.name: plane for plane in data.planes}
        for name, plane in planes.items():
            if device := _DEVICE.match(name):
                platform = device[1].lower()
                read = _gpu_operations if platform == "gpu" else _tpu_operations
                if operations := list(read(plane)):
                    trace.platform = platform
                    trace.devices[f"{platform}:{device[2]}"] = operations
        if _HOST in planes:
            _read_host(planes[_HOST], trace, has_devices=bool(trace.devices))
    return trace


def _gpu_operations(plane: Any) -> Iterator[DeviceOperation]:
    for line in plane.lines:
        # Other lines are derived by other tools.
        for event in line.events if line.name.startswith("Stream #") else ():
            stats = dict(event.stats)
            if not _NO_WORK.isdisjoint(stats):
                continue
            is_copy = event.name.startswith(_COPIES)
            name = event.name if is_copy else str(stats.get("hlo_op") or event.name)
            # A collective is a kernel of NCCL, whatever its instruction is called.
            is_message = is_collective(event.name) or is_collective(name)
            kind = "copy" if is_copy else "collective" if is_message else "compute"
            yield _operation(event, name, stats, kind)


def _tpu_operations(plane: Any) -> Iterator[DeviceOperation]:
    for line in plane.lines:
        for event in line.events if line.name in ("XLA Ops", "Async XLA Ops") else ():
            stats = dict(event.stats)
            name = str(stats.get("hlo_op") or event.name).split(" = ", 1)[0].lstrip("%")
            kind = "copy" if line.name == "Async XLA Ops" else "compute"
            yield _operation(event, name, stats, "collective" if is_collective(name) else kind)


def _read_host(plane: Any, trace: DeviceTrace, *, has_devices: bool) -> None:
    begun: dict[Any, tuple[Any, dict[str, Any]]] = {}
    ended: dict[Any, float] = {}
    for event in (event for line in plane.lines for event in line.events):
        name = event.name
        if name == INPUT:
            trace.input.append(_interval(event))
        elif name == END:
            trace.end_ns = float(event.start_ns)
        elif name == STEP:
            num_steps = int(dict(event.stats).get("num_steps", 1))
            trace.steps.append((_interval(event), num_steps))
        elif has_devices or "::" in name:
            continue
        elif name.startswith("end: "):
            ended[dict(event.stats).get("_c")] = float(event.start_ns)
        else:
            stats = dict(event.stats)
            if "hlo_op" in stats:
                begun[stats.get("_p", id(event))] = (event, stats)
    for identifier, (event, stats) in begun.items():
        name = str(stats["hlo_op"])
        kind = "collective" if is_collective(name) else "compute"
        operation = _operation(event, name, stats, kind)
        # The call of an asynchronous operation returns before its end.
        end_ns = max(operation.end_ns, ended.get(identifier, 0.0))
        operation = dataclasses.replace(operation, end_ns=end_ns)
        trace.devices.setdefault(f"cpu:{stats.get('device_ordinal', 0)}", []).append(operation)
    trace.steps.sort()


def _interval(event: Any) -> Interval:
    return float(event.start_ns), float(event.start_ns + event.duration_ns)


def _operation(event: Any, name: str, stats: dict[str, Any], kind: str) -> DeviceOperation:
    begin_ns, end_ns = _interval(event)
    return DeviceOperation(name, str(stats.get("hlo_module", "")), begin_ns, end_ns, kind)


# Shares of the time of profiled steps.

PARTS = ("compute", "collectives", "copies", "input", "host")
# The parts of operations and of the host's work on input, in the order in which they count.
_RANKS = {"compute": 0, "collective": 1, "copy": 2, "input": 3}
_NS = 1e-9
# A smaller share of waiting for input is not worth a word.
_MOST_INPUT = 0.1
_OUTER = ("while", "conditional", "cond", "call")

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
            first that applies: a device computes, waits for a collective, or copies; or is idle
            while the host works on input, or does something else ("host").
        collectives_s: seconds in which a collective is in progress, with or without compute.
        operations: all operations, longest first.

    Example:
        >>> summary = sg.profiling.ProfileSummary(
        ...     platform="gpu", num_devices=8, num_steps=10, whole_s=0.5, collectives_s=0.2,
        ...     parts_s={"compute": 0.3, "collectives": 0.05, "copies": 0.0, "input": 0.06,
        ...              "host": 0.09}, operations=())
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
        }
        fields["operations"] = [dataclasses.asdict(one) for one in self.operations[:top]]
        return fields


def summarize(trace: DeviceTrace, instructions: Instructions | None = None) -> ProfileSummary:
    """Summarizes a trace that has operations; `instructions` describe those of its programs."""
    instructions = instructions or {}
    begin_ns, end_ns = window = _window(trace)
    devices = [
        [
            _with_kind(one, instructions)
            for one in _innermost(operations, instructions)
            if one.end_ns > begin_ns and one.begin_ns < end_ns
        ]
        for operations in trace.devices.values()
    ]
    found = [_parts_ns(operations, trace.input, window) for operations in devices]
    # The last one is the time of all collectives, hidden by others or not.
    mean_s = [_NS * sum(times) / len(devices) for times in zip(*found, strict=True)]
    return ProfileSummary(
        platform=trace.platform,
        num_devices=len(devices),
        num_steps=sum(count for (begin, _), count in trace.steps if begin < end_ns),
        whole_s=(end_ns - begin_ns) * _NS,
        parts_s=dict(zip(PARTS, mean_s, strict=False)),
        collectives_s=mean_s[-1],
        operations=_operations(devices, instructions),
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


def _parts_ns(
    operations: Sequence[DeviceOperation], input_ns: Iterable[Interval], window: Interval
) -> list[float]:
    """Returns nanoseconds of each part on one device, and of all collectives."""
    spans = [(one.begin_ns, one.end_ns, _RANKS[one.kind]) for one in operations]
    spans += [(begin_ns, end_ns, _RANKS["input"]) for begin_ns, end_ns in input_ns]
    edges: list[tuple[float, int, int]] = []
    for begin_ns, end_ns, rank in spans:
        begin_ns, end_ns = max(begin_ns, window[0]), min(end_ns, window[1])
        if begin_ns < end_ns:
            edges += [(begin_ns, rank, 1), (end_ns, rank, -1)]
    parts_ns, collectives_ns = [0.0] * len(PARTS), 0.0
    active, now_ns = [0] * len(_RANKS), window[0]
    for at_ns, rank, change in [*sorted(edges), (window[1], 0, 0)]:
        first = next((rank for rank, count in enumerate(active) if count), len(_RANKS))
        parts_ns[first] += at_ns - now_ns
        collectives_ns += at_ns - now_ns if active[_RANKS["collective"]] else 0.0
        active[rank] += change
        now_ns = at_ns
    return [*parts_ns, collectives_ns]


def _operations(
    devices: Sequence[Sequence[DeviceOperation]], instructions: Instructions
) -> tuple[ProfiledOperation, ...]:
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for one in (one for operations in devices for one in operations):
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


# Files of a profile: the trace, and the layers of the operations in it.

_TRACE = ".xplane.pb"
# Written beside the trace, which has no scopes of operations.
INSTRUCTIONS = "operations.json"


def find_traces(path: Path) -> list[Path]:
    """Returns the trace files in a folder, of the latest profile of each worker.

    Raises FileNotFoundError if there is none.
    """
    if path.is_file():
        return [path]
    traces = sorted(path.rglob(f"*{_TRACE}")) if path.is_dir() else []
    if not traces:
        problem = "has no trace" if path.is_dir() else "does not exist"
        raise FileNotFoundError(
            explain(
                f"{path} {problem}.",
                expected=f"a {_TRACE} file, or a folder with one at any depth.",
                fix="pass the folder given to sg.profile or jax.profiler.start_trace.",
            )
        )
    latest: dict[Path, Path] = {}
    for trace in traces:  # WORKER/plugins/profile/TIME/HOST.xplane.pb
        latest[trace.parent.parent] = trace.parent
    return [trace for trace in traces if latest[trace.parent.parent] == trace.parent]


def read_profiles(path: Path) -> dict[Path, ProfileSummary]:
    """Summarizes the traces that `find_traces` returns."""
    return {
        trace: summarize(read_trace(trace), _read_instructions(trace))
        for trace in find_traces(path)
    }


def read_profile(path: str | Path) -> ProfileSummary:
    """Summarizes a profile of one process.

    Args:
        path: a folder with a trace at any depth, or the `.xplane.pb` file. In a folder, the latest
            profile counts.

    Returns:
        The summary.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: the file is not a trace, lists no operations, or there are several workers'.

    Example:
        >>> import tempfile
        >>> add = jax.jit(lambda x: x + 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with jax.profiler.trace(folder):
        ...         three = add(2).block_until_ready()
        ...     summary = sg.profiling.read_profile(folder)
        >>> summary.platform, summary.num_devices, summary.num_steps
        ('cpu', 1, 0)

    Source: JAX, jax.profiler.ProfileData.
    """
    found = read_profiles(Path(path))
    if len(found) > 1:
        raise invalid(
            f"{path} has traces of {len(found)} workers.",
            expected="one trace.",
            fix=f"pass one of: {', '.join(map(str, found))}.",
        )
    return next(iter(found.values()))


def _read_instructions(trace: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Returns the instructions that are written beside a trace; none for traces of other tools."""
    path = trace.with_name(INSTRUCTIONS)
    if not path.is_file():
        return {}
    try:
        programs: dict[str, dict[str, tuple[str, str]]] = json.loads(path.read_text())["programs"]
    except (KeyError, TypeError, ValueError) as error:
        raise invalid(
            f"{path} cannot be read ({type(error).__name__}: {error}).",
            expected="JSON as sg.profile writes it beside a trace.",
            fix="delete it: the summary then has no layers.",
        ) from error
    return programs


# Tables of a profile, for the terminal.


_MEANINGS = {
    "compute": "devices compute",
    "collectives": "devices exchange data or wait for others",
    "copies": "devices wait for copies from or to the host",
    "input": "devices idle, the host loads a batch",
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
        share = f"{summary.share('input'):.0%}"
        text = f"Input-bound: the devices wait {share} of the time for batches."
        console.print(Text(text))
    if top:
        console.print(_operations_table(summary, top))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _parts_table(summary: ProfileSummary) -> Table:
    title = "Time of a step" if summary.num_steps else "Time"
    table = table_of(title, "part", ">share", ">time", "meaning")
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

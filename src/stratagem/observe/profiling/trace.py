"""Operations of devices and marks of the host in a trace that JAX's profiler wrote.

Names of planes, lines and statistics are from XLA: `tsl/profiler/utils/xplane_schema.cc`. On CPU, a
thread of the host starts an operation, and the event "end: NAME" with the same identifier ends it
(`backends/cpu/runtime/thunk_executor.cc`). On GPU, each stream is a line of the device
(`backends/profiler/gpu/cupti_collector.cc`). On TPU, the operations are on the line "XLA Ops".
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
from jax.profiler import ProfileData

from stratagem.errors import explain

# Names of this library's marks in a trace, and of JAX's that a summary reads.

STEP = "stratagem step"
INPUT = "stratagem input"
END = "stratagem end"
# Host events of JAX while it lowers and compiles a program.
COMPILATION = ("backend_compile_and_load", "backend_compile", "lower_sharding_computation")


def input_mark() -> jax.profiler.TraceAnnotation:
    """Returns a context that marks the host's work on the next batch; 0.4 us without a trace."""
    return jax.profiler.TraceAnnotation(INPUT)


# Sets of points in time, as sorted lists of intervals that do not overlap.

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Merges intervals in any order; empty ones disappear."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns the points in both sets."""
    common: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Returns the points of the first set that are not in the second."""
    if not first:
        return []
    edges = [first[0][0], *(edge for one in second for edge in one), first[-1][1]]
    gaps = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
    return intersect(first, gaps)


def clip(intervals: Sequence[Interval], window: Interval) -> list[Interval]:
    """Returns the points inside a window."""
    return intersect(intervals, [window])


def length(intervals: Iterable[Interval]) -> float:
    """Returns the total length of a set."""
    return sum(end - begin for begin, end in intervals)


_HOST = "/host:CPU"
_GPU = re.compile(r"^/device:GPU:(\d+)$")
_TPU = re.compile(r"^/device:TPU:(\d+)$")
_NAME = re.compile(r"^%?([\w.-]+)")
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


class HasPlanes(Protocol):
    """A `jax.profiler.ProfileData`, which is no type for type checkers."""

    @property
    def planes(self) -> Iterable[Any]: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, slots=True)
class DeviceOperation:
    """An operation that a device ran.

    `kind` is "compute", "collective", or "copy" for a copy between the memories of the host and of
    devices. `run` identifies the execution of the program where the trace does so.
    """

    name: str
    module: str
    begin_ns: float
    end_ns: float
    kind: str = "compute"
    run: object = None

    @property
    def interval(self) -> Interval:
        """Its begin and end."""
        return self.begin_ns, self.end_ns


@dataclasses.dataclass
class DeviceTrace:
    """Operations and marks of a trace; times are in nanoseconds.

    `devices` maps "cpu:0" to operations. `executions` has the intervals in which programs ran,
    where the trace lists them. `steps` are the host's calls with their number of steps. `end_ns` is
    the end of the profiled steps on the host.
    """

    platform: str
    devices: dict[str, list[DeviceOperation]]
    executions: dict[str, list[Interval]]
    steps: list[tuple[Interval, int]]
    input: list[Interval]
    compilation: list[Interval]
    end_ns: float | None


def is_collective(name: str) -> bool:
    """Returns True for the name or the kind of an operation that exchanges data."""
    return _COLLECTIVE.match(name) is not None


def read_trace(path: Path) -> DeviceTrace:
    """Reads an `.xplane.pb` file; raises ValueError if it is not one, or lists no operations."""
    try:
        data = ProfileData.from_serialized_xspace(path.read_bytes())
    except RuntimeError as error:
        raise ValueError(
            explain(
                f"{path} cannot be read as a trace ({error}).",
                expected="an .xplane.pb file as jax.profiler writes it.",
                fix="profile again: the file may be incomplete.",
            )
        ) from error
    trace = parse_trace(data)
    if not any(trace.devices.values()):
        raise ValueError(
            explain(
                f"{path} lists no operations of a device.",
                expected="a trace in which a compiled program ran on a CPU, GPU or TPU.",
                fix="profile steps that run on devices; with ProfileOptions of your own, leave "
                "host_tracer_level at 2.",
            )
        )
    return trace


def parse_trace(data: HasPlanes) -> DeviceTrace:
    """Collects operations and marks; the operations of an accelerator replace those of its host."""
    trace = DeviceTrace("cpu", {}, {}, [], [], [], None)
    with warnings.catch_warnings():
        # Types of the profile have no module, which Python 3.13 warns about.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = {plane.name: plane for plane in data.planes}
        for platform, pattern, read in (("gpu", _GPU, _read_gpu), ("tpu", _TPU, _read_tpu)):
            for name, plane in planes.items():
                if number := pattern.match(name):
                    device = f"{platform}:{number[1]}"
                    operations, executions = read(plane)
                    if operations:
                        trace.platform = platform
                        trace.devices[device] = operations
                        trace.executions[device] = union(executions)
        if _HOST in planes:
            _read_host(planes[_HOST], trace, has_devices=bool(trace.devices))
    trace.input, trace.compilation = union(trace.input), union(trace.compilation)
    return trace


def _read_gpu(plane: Any) -> tuple[list[DeviceOperation], list[Interval]]:
    operations: list[DeviceOperation] = []
    for line in plane.lines:
        if not line.name.startswith("Stream #"):
            continue  # derived by other tools
        for event in line.events:
            stats = dict(event.stats)
            if not _NO_WORK.isdisjoint(stats):
                continue
            is_copy = event.name.startswith(_COPIES)
            name = event.name if is_copy else str(stats.get("hlo_op") or event.name)
            # A collective is a kernel of NCCL, whatever its instruction is called.
            is_message = is_collective(event.name) or is_collective(name)
            kind = "copy" if is_copy else "collective" if is_message else "compute"
            operations.append(_operation(event, name, stats, kind))
    return operations, []


def _read_tpu(plane: Any) -> tuple[list[DeviceOperation], list[Interval]]:
    operations: list[DeviceOperation] = []
    executions: list[Interval] = []
    for line in plane.lines:
        if line.name == "XLA Modules":
            executions += [_interval(event) for event in line.events]
        elif line.name in ("XLA Ops", "Async XLA Ops"):
            for event in line.events:
                stats = dict(event.stats)
                name = str(stats.get("hlo_op") or event.name).split(" = ", 1)[0].lstrip("%")
                kind = "copy" if line.name == "Async XLA Ops" else "compute"
                kind = "collective" if is_collective(name) else kind
                operations.append(_operation(event, name, stats, kind))
    return operations, executions


def _read_host(plane: Any, trace: DeviceTrace, *, has_devices: bool) -> None:
    begun: dict[Any, tuple[Any, dict[str, Any]]] = {}
    ended: dict[Any, float] = {}
    readers: dict[str, Callable[[Any], None]] = {
        INPUT: lambda event: trace.input.append(_interval(event)),
        END: lambda event: setattr(trace, "end_ns", float(event.start_ns)),
        STEP: lambda event: trace.steps.append(_step(event)),
        **dict.fromkeys(COMPILATION, lambda event: trace.compilation.append(_interval(event))),
    }
    for event in _events(plane):
        name = event.name
        if read := readers.get(name):
            read(event)
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
        end_ns = max(operation.end_ns, ended.get(identifier, 0.0))
        operation = dataclasses.replace(operation, end_ns=end_ns)
        trace.devices.setdefault(f"cpu:{stats.get('device_ordinal', 0)}", []).append(operation)
    trace.steps.sort()


def _events(plane: Any) -> Iterator[Any]:
    for line in plane.lines:
        yield from line.events


def _interval(event: Any) -> Interval:
    return float(event.start_ns), float(event.start_ns + event.duration_ns)


def _step(event: Any) -> tuple[Interval, int]:
    return _interval(event), int(dict(event.stats).get("num_steps", 1))


def _operation(event: Any, name: str, stats: dict[str, Any], kind: str) -> DeviceOperation:
    begin_ns, end_ns = _interval(event)
    module = str(stats.get("hlo_module", ""))
    return DeviceOperation(name, module, begin_ns, end_ns, kind, stats.get("run_id"))

"""Kernels of a trace, each beside what its instruction would take at the peak of the device."""

from __future__ import annotations

import dataclasses
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax.extend import backend
from jax.profiler import ProfileData

from stratagem.observe.profiling import DeviceOperation, read_trace
from stratagem.planning.schedule import OperationCost, Schedule, operation_costs
from stratagem.planning.targets import Accelerator

__all__ = ["Kernel", "by_kind", "costs_of_program", "host_calls", "kernels_of", "step_gaps"]

_STREAM = "Stream #"
# A CUDA graph of many instructions. XLA's own kernels in it have the names of theirs.
_GRAPH = "command_buffer"
_HOSTS = ("/host:CPU", "/host:CUPTI")
_STEP = "stratagem step"
_NS = 1e-9
# Shorter kernels are bound by their launch.
_SMALL_S = 4e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel, summed over a profile.

    Args:
        name: of the function on the device.
        instruction: that it belongs to.
        program: of the instruction.
        kind: of the instruction, such as "convolution".
        count: executions.
        time_s: seconds of all.
        product_s: seconds of one instruction's products at the peak rate; 0 without.
        memory_s: seconds of one instruction's bytes at the peak rate.
        instruction_s: median seconds of one instruction, which may be several kernels.
    """

    name: str
    instruction: str
    program: str
    kind: str
    count: int
    time_s: float
    product_s: float
    memory_s: float
    instruction_s: float

    @property
    def share_of_peak(self) -> float:
        """Seconds at the peak that binds it, by its own seconds."""
        bound_s = max(self.product_s, self.memory_s)
        return bound_s / self.instruction_s if self.instruction_s else 0.0

    @property
    def bound(self) -> str:
        """Returns "products" or "memory", whichever takes longer at the peak."""
        return "products" if self.product_s > self.memory_s else "memory"


def costs_of_program(name: str, ran: set[str]) -> Mapping[str, tuple[str, OperationCost]]:
    """Returns kind and cost of each instruction of a program that this process compiled.

    Args:
        name: of the program.
        ran: instructions that ran, which tell programs of one name apart.
    """
    texts = [
        module.to_string()
        for executable in backend.get_backend().live_executables()
        for module in executable.hlo_modules()
        if module.name == name
    ]
    found: list[dict[str, tuple[str, OperationCost]]] = []
    for text in texts:
        schedule = Schedule(text)
        pairs = zip(schedule.operations(), operation_costs(schedule), strict=True)
        costs = {one.name: (_kind(one.name, one.products), cost) for one, cost in pairs}
        found.append({_as_kernel(one): cost for one, cost in costs.items()} | costs)
    return max(found, key=lambda costs: len(ran & costs.keys()), default={})


def _as_kernel(instruction: str) -> str:
    """Returns the name of the kernel that XLA makes of an instruction."""
    return re.sub(r"[^A-Za-z0-9_]", "_", instruction)


def _kind(name: str, products: Sequence[Any]) -> str:
    lines = " ".join(product.instruction.line for product in products)
    if "fmha" in name:
        return "attention"
    if "conv" in lines and "dim_labels" in lines:
        return "convolution"
    return "product" if products else "memory"


def kernels_of(path: Path, accelerator: Accelerator) -> list[Kernel]:
    """Returns the kernels of a trace, longest first.

    Args:
        path: of the trace.
        accelerator: whose peak rates count.
    """
    rows = list(_rows(path))
    ran: dict[str, set[str]] = defaultdict(set)
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    per_instruction: dict[tuple[str, str], list[float]] = defaultdict(list)
    for name, instruction, program, seconds in rows:
        ran[program].add(instruction)
        times[name, instruction, program].append(seconds)
    costs = {program: costs_of_program(program, names) for program, names in ran.items()}
    for (_, instruction, program), several in times.items():
        per_instruction[instruction, program].append(statistics.median(several))
    kernels = [
        _kernel(key, several, sum(per_instruction[key[1], key[2]]), costs[key[2]], accelerator)
        for key, several in times.items()
    ]
    return sorted(kernels, key=lambda one: -one.time_s)


def _kernel(
    key: tuple[str, str, str],
    times_s: Sequence[float],
    instruction_s: float,
    costs: Mapping[str, tuple[str, OperationCost]],
    accelerator: Accelerator,
) -> Kernel:
    name, instruction, program = key
    unknown = "unknown", OperationCost("float32", 0.0, 0)
    kind, cost = costs.get(instruction) or costs.get(_as_kernel(instruction), unknown)
    if kind == "unknown" and any(word in name for word in ("fprop", "dgrad", "wgrad")):
        kind = "convolution"
    kind = "attention" if "fmha" in name or "flash" in name.lower() else kind
    return Kernel(
        name=name,
        instruction=instruction,
        program=program,
        kind=kind,
        count=len(times_s),
        time_s=sum(times_s),
        product_s=cost.flops / accelerator.peak_flops_per_s(cost.dtype),
        memory_s=cost.accessed_bytes / accelerator.memory_bytes_per_s,
        instruction_s=instruction_s,
    )


def _rows(path: Path) -> list[tuple[str, str, str, float]]:
    """Returns kernel, instruction, program and seconds of each event on a stream.

    A CPU has no kernels: there its operations stand for them.
    """
    rows: list[tuple[str, str, str, float]] = []
    for plane in ProfileData.from_serialized_xspace(path.read_bytes()).planes:
        if not plane.name.startswith("/device:GPU:"):
            continue
        for line in plane.lines:
            if not line.name.startswith(_STREAM):
                continue
            for event in line.events:
                stats = dict(event.stats)
                instruction = str(stats.get("hlo_op") or event.name)
                if instruction.startswith(_GRAPH):
                    instruction = event.name
                module = str(stats.get("hlo_module", ""))
                rows.append((event.name, instruction, module, event.duration_ns * _NS))
    return rows or [_row(one) for many in read_trace(path).devices.values() for one in many]


def _row(one: DeviceOperation) -> tuple[str, str, str, float]:
    return one.name, one.name, one.module, (one.end_ns - one.begin_ns) * _NS


def by_kind(kernels: Sequence[Kernel]) -> list[dict[str, Any]]:
    """Returns the achieved share of the peak of each kind of instruction, small ones apart.

    Args:
        kernels: of a profile.
    """
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for one in kernels:
        size = "small " if one.instruction_s < _SMALL_S else ""
        groups[f"{size}{one.kind}, bound by {one.bound}"].append(one)
    return [
        {
            "kind": kind,
            "num_kernels": sum(one.count for one in several),
            "time_s": sum(one.time_s for one in several),
            "share_of_peak": _weighted([(one.share_of_peak, one.time_s) for one in several]),
            "median_kernel_s": statistics.median(one.time_s / one.count for one in several),
        }
        for kind, several in sorted(groups.items())
    ]


def _weighted(pairs: Sequence[tuple[float, float]]) -> float:
    whole = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / whole if whole else 0.0


def host_calls(path: Path, top: int = 25) -> list[dict[str, Any]]:
    """Returns the longest events of the host's threads, summed by thread and name.

    Args:
        path: of the trace.
        top: how many.
    """
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for plane in ProfileData.from_serialized_xspace(path.read_bytes()).planes:
        if plane.name not in _HOSTS:
            continue
        for line in plane.lines:
            for event in line.events:
                times[f"{plane.name} {line.name}", event.name].append(event.duration_ns * _NS)
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:top]
    return [
        {"thread": thread, "name": name[:160], "count": len(several), "time_s": sum(several)}
        for (thread, name), several in longest
    ]


def step_gaps(path: Path) -> dict[str, Any]:
    """Returns seconds of each call of a step on the host, and of the host's work between two.

    Args:
        path: of the trace.
    """
    marks = sorted(
        (event.start_ns, event.start_ns + event.duration_ns)
        for plane in ProfileData.from_serialized_xspace(path.read_bytes()).planes
        if plane.name == "/host:CPU"
        for line in plane.lines
        for event in line.events
        if event.name == _STEP
    )
    calls_s = [(end - begin) * _NS for begin, end in marks]
    between_s = [(begin - end) * _NS for (_, end), (begin, _) in itertools.pairwise(marks)]
    return {
        "calls_s": calls_s,
        "between_s": between_s,
        "median_call_s": statistics.median(calls_s) if calls_s else None,
        "median_between_s": statistics.median(between_s) if between_s else None,
    }

"""`sg.collectives.explain`: prints the algorithms chosen for a strategy, and the measurements."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.devices.collectives.all_reduce import AllReduce, ChosenAllReduce
from stratagem.devices.collectives.choice import Choice
from stratagem.devices.collectives.measurement import MeasuredChoice
from stratagem.devices.collectives.packing import (
    NO_PACKING,
    WITHIN_PROCESS,
    GradientPacking,
    NumberedPacks,
    SizedPacks,
)
from stratagem.devices.mesh import Topology

if TYPE_CHECKING:
    from stratagem.strategies.base.strategy import Strategy


def explain(strategy: Strategy) -> None:
    """Prints how a strategy combines values over its replicas, and the measurements behind it.

    Args:
        strategy: a strategy.

    Example:
        >>> sg.collectives.explain(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
        2 replicas on 1 process, cpu
        algorithm: compiler
        gradients: packed together up to 64 KiB each, if at most 16
        Not measured: within one process, and on accelerators, the compiler tunes itself.

    Source: specific to Stratagem.
    """
    ops, topology = strategy.cross_device_ops, strategy.topology
    lines = _report_lines(ops.all_reduce(topology), topology, getattr(ops, "measured", None))
    if ops.compression is not None:
        lines.append(f"gradients of matrices: as {ops.compression}")
    if strategy.local_updates is not None:
        lines.append(f"weights synchronized every {strategy.local_updates.least_period} steps")
    lines += strategy.describe().advice
    print("\n".join(lines))


def _report_lines(
    all_reduce: AllReduce, topology: Topology, measured: MeasuredChoice | None
) -> list[str]:
    num_processes = len({process for own in topology.processes_of_inputs for process in own})
    replicas = _count_text(topology.num_replicas, "replica")
    processes = _count_text(num_processes, "process")
    lines = [f"{replicas} on {processes}, {topology.platform}"]
    if not isinstance(all_reduce, ChosenAllReduce):
        return [*lines, "algorithm: custom function of the values of all replicas"]
    lines.append(f"algorithm: {_describe_choice(all_reduce.choice)}")
    lines.append(f"gradients: {_describe_packing(all_reduce.packing)}")
    if all_reduce.in_bfloat16:
        lines.append("float32 gradients: sent as bfloat16, by a separate algorithm")
    if measured is None:
        lines.append(
            "Not measured: within one process, and on accelerators, the compiler tunes itself."
        )
        return lines
    lines.append(f"Milliseconds per float32 sum, {measured.source}:")
    sizes = sorted(next(iter(measured.times_s.values())))
    lines.append(f"{'':14}" + "".join(f"{_size_text(size):>10}" for size in sizes))
    for algorithm, times_s in measured.times_s.items():
        figures = "".join(f"{times_s[size] * 1e3:>10.3f}" for size in sizes)
        lines.append(f"{algorithm.value:14}{figures}")
    return lines


def _describe_choice(choice: Choice) -> str:
    parts = [f"{algorithm.value} up to {_size_text(limit)}" for limit, algorithm in choice.limits]
    return ", ".join([*parts, choice.default.value + (" above" if parts else "")])


def _describe_packing(packing: GradientPacking) -> str:
    if packing == NO_PACKING:
        return "not packed, but the compiler may combine them"
    if packing == WITHIN_PROCESS:
        size = _size_text(WITHIN_PROCESS.max_array_bytes)
        return f"packed together up to {size} each, if at most {WITHIN_PROCESS.max_num_arrays}"
    if isinstance(packing, NumberedPacks):
        return f"in {_count_text(packing.num_packs, 'pack')}"
    assert isinstance(packing, SizedPacks)
    return f"in packs of {_size_text(packing.pack_bytes)}"


def _count_text(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" + ("" if number == 1 else plural)


def _size_text(size_bytes: int) -> str:
    for unit, name in ((2**20, "MiB"), (2**10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes} B"

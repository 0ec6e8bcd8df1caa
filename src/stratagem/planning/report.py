"""Tables of a plan, for the terminal."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.logs import size_text

if TYPE_CHECKING:
    from stratagem.planning.result import Plan
    from stratagem.planning.schedule import Reduction


def time_text(seconds: float) -> str:
    """Formats a short duration: "1.25 s", "3.4 ms", "12 us"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def count_text(number: float) -> str:
    """Formats a large number with a metric prefix: "12", "25.6 M", "1.09 G"."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def headline(plan: Plan) -> str:
    """Returns one line that names the model, the target and the batch."""
    placed = f", shard_state={plan.shard_state}" if plan.shard_state else ""
    if plan.devices_per_replica > 1:
        replicas = "replica" if plan.num_replicas == 1 else "replicas"
        placed += f", {plan.num_replicas} {replicas} of {plan.devices_per_replica} devices"
    return (
        f"{plan.title} on {plan.target.name}{placed}: {count_text(plan.num_parameters)} "
        f"parameters, global batch {plan.global_batch}, {plan.per_device_batch} per "
        f"{'device' if plan.devices_per_replica == 1 else 'replica'}"
    )


def verdict(plan: Plan) -> str:
    """Returns one line about whether the step fits."""
    memory, device = plan.memory, plan.target.accelerator
    total = size_text(memory.total_bytes)
    if plan.is_refused:
        return f"Does not fit: the compiler rejects it for {size_text(memory.device_bytes)}."
    if memory.fits:
        return f"Fits: {total} of the {size_text(memory.pool_bytes)} in JAX's memory pool."
    if memory.total_bytes <= 0.95 * memory.device_bytes and device.platform == "gpu":
        return (
            f"Fits only with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95: {total} of "
            f"{size_text(memory.device_bytes)}."
        )
    return f"Does not fit: {total} needed, {size_text(memory.device_bytes)} per device."


def show(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan."""
    console = console or Console(highlight=False)
    console.print(Text(headline(plan)), style="bold")
    console.print(Text(verdict(plan)), style="green" if plan.fits else "red")
    if not plan.fits and plan.shared_state_bytes:
        console.print(Text(_shard_state_advice(plan)))
    console.print(_memory_table(plan))
    console.print(_reduction_table(plan))
    console.print(_time_table(plan))
    for line in _assumption_lines(plan):
        console.print(Text(f"- {line}"), style="dim")


def parts_of(plan: Plan) -> list[str | Table]:
    """Returns the lines and tables of a plan, without its assumptions."""
    tables = [_memory_table(plan), _reduction_table(plan), _time_table(plan)]
    advice = [_shard_state_advice(plan)] if not plan.fits and plan.shared_state_bytes else []
    return [headline(plan), verdict(plan), *advice, *tables, *plan.notes]


def _shard_state_advice(plan: Plan) -> str:
    """Returns the arithmetic of `shard_state` on the variables of a device."""
    held = " or ".join(
        f"{size_text(size)} (shard_state={name})" for name, size in plan.shared_state_bytes.items()
    )
    return (
        f"Variables take {size_text(plan.memory.state_bytes)} per device. Sharded over the "
        f"replicas they would take {held}. Activations and gradients below are those of the "
        "replicated program; plan with --shard-state to see those of the sharded one."
    )


def _memory_table(plan: Plan) -> Table:
    table = Table(title="Memory per device", title_justify="left")
    table.add_column("part")
    table.add_column("size", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    total = plan.memory.total_bytes
    for name, size in plan.memory.parts():
        if size:
            table.add_row(name, size_text(size), f"{size / total:.1%}")
            if name == "activations and gradients":
                gradients = size_text(plan.memory.gradients_bytes)
                table.add_row("  all gradients at once would be", f"({gradients})", "")
    table.add_section()
    table.add_row("total", size_text(total), "100.0%")
    table.add_row("JAX memory pool", size_text(plan.memory.pool_bytes), "")
    table.add_row("device memory", size_text(plan.memory.device_bytes), "")
    if plan.memory.host_bytes:
        table.add_row("host memory for variables", size_text(plan.memory.host_bytes), "")
    return table


def _reduction_table(plan: Plan) -> Table:
    table = Table(title="Communication per step", title_justify="left")
    table.add_column("kind")
    for name in ("messages", "bytes", "overlapped"):
        table.add_column(name, justify="right", no_wrap=True)
    messages: defaultdict[str, float] = defaultdict(float)
    sizes: defaultdict[str, float] = defaultdict(float)
    behind: defaultdict[str, float] = defaultdict(float)
    for one in plan.reductions:
        kind = f"{one.kind}{_scope_suffix(plan, one)}"
        messages[kind] += one.times
        sizes[kind] += one.times * one.num_bytes
        behind[kind] += one.times * one.num_bytes if one.behind else 0
    for kind, count in messages.items():
        share = f"{behind[kind] / sizes[kind]:.0%}" if sizes[kind] else "-"
        shown = share if plan.is_scheduled else "unknown"
        table.add_row(kind, f"{count:.4g}", size_text(sizes[kind]), shown)
    if not messages:
        table.add_row("none", "0", "0 B", "-")
    return table


def _scope_suffix(plan: Plan, one: Reduction) -> str:
    target = plan.target
    whole = len(one.groups[0]) == target.num_devices if one.groups else not one.leaves_slice
    if target.num_groups == 1 and whole:
        return ""
    if whole:
        return ", all devices"
    group = one.groups[0] if one.groups else ()
    leaves = one.leaves_slice or len({device // target.devices_per_group for device in group}) > 1
    scope = "slices" if target.shape else "hosts"
    return f", between {scope}" if leaves else f", within {scope}"


def _time_table(plan: Plan) -> Table:
    table = Table(title="Predicted step time (not measured)", title_justify="left")
    for name in ("devices", "compute", "comm", "hidden", "step", "best case", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for time in plan.scaling:
        table.add_row(
            str(time.num_devices),
            time_text(time.compute_s + time.launch_s),
            time_text(time.reduction_s),
            time_text(time.hidden_s),
            time_text(time.step_s),
            time_text(time.shortest_s),
            f"{time.efficiency:.2f}",
        )
    return table


def _launch_lines(plan: Plan) -> list[str]:
    if not plan.num_launches:
        return []
    launches = time_text(plan.step.launch_s)
    return [f"'compute' includes {plan.num_launches} kernel starts per step, {launches}."]


def _assumption_lines(plan: Plan) -> list[str]:
    kind = plan.target.accelerator
    rates = ", ".join(
        f"{count_text(count)}FLOP in {dtype} at {count_text(kind.peak_flops_per_s(dtype))}FLOP/s"
        for dtype, count in plan.flops.items()
    )
    rates = rates or "none"
    by_memory = (
        f", {time_text(plan.products_s)} in all; {size_text(plan.accessed_bytes)} accessed take "
        f"{time_text(plan.memory_s)}. Each operation takes the longer of both"
        if plan.compiler != "cpu"
        else "; only the compiler for the devices reports the bytes that a step accesses"
    )
    pinned = (
        [
            f"Each step copies {size_text(plan.brought_bytes)} per device from pinned host memory, "
            f"and {size_text(plan.put_back_bytes)} back. The times exclude this."
        ]
        if plan.brought_bytes
        else []
    )
    host = (
        [
            f"Each step sends {size_text(plan.from_host_bytes)} from the host to every device, and "
            f"{size_text(plan.to_host_bytes)} from the first device to the host, which updates "
            "its variables. The times exclude this."
        ]
        if plan.from_host_bytes or plan.to_host_bytes
        else []
    )
    return [
        f"Compiled for {plan.compiler.upper()}. Products per device: {rates}{by_memory}.",
        f"{kind.name}: memory {count_text(kind.memory_bytes_per_s)}B/s, links "
        f"{count_text(kind.link_bytes_per_s)}B/s, network {count_text(kind.network_bytes_per_s)}"
        "B/s, per device and direction.",
        *_launch_lines(plan),
        "Assumed: " + "; ".join(plan.assumptions.lines()) + ".",
        "The batch per device is constant. 'hidden' is communication that the compiler's schedule "
        "overlaps with products, 'best case' assumes full overlap. Input, stragglers, memory of "
        "CUDA and communication libraries, and fragmentation are excluded.",
        *host,
        *pinned,
        *plan.notes,
    ]

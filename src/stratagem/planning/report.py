"""A plan as tables."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.planning.reductions import Reduction
from stratagem.planning.result import Plan

__all__ = ["count_text", "headline", "show", "size_text", "time_text", "verdict"]

_BYTES_PER_GIB = 2**30
_BYTES_PER_MIB = 2**20


def size_text(num_bytes: float) -> str:
    """Writes a size with as many digits as one wants to read.

    Args:
        num_bytes: at least 0.

    Returns:
        Such as "3.82 GiB", "12.5 MiB" or "740 B".

    Example:
        >>> [size_text(size) for size in (740, 13_107_200, 4 * 2**30)]
        ['740 B', '12.5 MiB', '4.00 GiB']
    """
    if num_bytes >= _BYTES_PER_GIB / 10:
        return f"{num_bytes / _BYTES_PER_GIB:.2f} GiB"
    if num_bytes >= _BYTES_PER_MIB / 10:
        return f"{num_bytes / _BYTES_PER_MIB:.1f} MiB"
    return f"{num_bytes / 1024:.1f} KiB" if num_bytes >= 1000 else f"{num_bytes:.0f} B"


def time_text(seconds: float) -> str:
    """Writes a short time.

    Args:
        seconds: at least 0.

    Returns:
        Such as "1.25 s", "3.4 ms" or "12 us".

    Example:
        >>> [time_text(seconds) for seconds in (1.25, 0.0034, 1.2e-5)]
        ['1.25 s', '3.4 ms', '12 us']
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def count_text(number: float) -> str:
    """Writes a large number.

    Args:
        number: at least 0.

    Example:
        >>> [count_text(number) for number in (12, 25_600_000, 1_090_000_000)]
        ['12', '25.6 M', '1.09 G']
    """
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"


def headline(plan: Plan) -> str:
    """Says in one line what is planned.

    Args:
        plan: the plan.
    """
    placed = f", shard_state={plan.shard_state}" if plan.shard_state else ""
    if plan.devices_per_replica > 1:
        replicas = "replica" if plan.num_replicas == 1 else "replicas"
        placed += f", {plan.num_replicas} {replicas} of {plan.devices_per_replica} devices"
    return (
        f"{plan.title} on {plan.target.name}{placed}: {count_text(plan.num_parameters)} "
        f"parameters, batch {plan.global_batch}, {plan.per_device_batch} a "
        f"{'device' if plan.devices_per_replica == 1 else 'replica'}"
    )


def verdict(plan: Plan) -> str:
    """Says in one line whether a step fits.

    Args:
        plan: the plan.
    """
    memory, device = plan.memory, plan.target.accelerator
    total = size_text(memory.total_bytes)
    if plan.is_refused:
        return f"Does not fit: the compiler refuses it for {size_text(memory.device_bytes)}."
    if memory.fits:
        return f"Fits: {total} of the {size_text(memory.pool_bytes)} that JAX gives a program."
    if memory.total_bytes <= 0.95 * memory.device_bytes and device.platform == "gpu":
        return (
            f"Fits with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 only: {total} of "
            f"{size_text(memory.device_bytes)}."
        )
    return f"Does not fit: {total}, and a device has {size_text(memory.device_bytes)}."


def show(plan: Plan, console: Console) -> None:
    """Prints a plan.

    Args:
        plan: the plan.
        console: where to.
    """
    console.print(Text(headline(plan)), style="bold")
    console.print(Text(verdict(plan)), style="green" if plan.fits else "red")
    if not plan.fits and plan.shared_state_bytes:
        console.print(Text(_if_shared(plan)))
    console.print(_memory_table(plan))
    console.print(_reduction_table(plan))
    console.print(_time_table(plan))
    for line in _assumption_lines(plan):
        console.print(Text(f"- {line}"), style="dim")


def _if_shared(plan: Plan) -> str:
    """What a device would hold of the variables if replicas shared them out: arithmetic."""
    held = " or ".join(
        f"{size_text(size)} (shard_state={name})" for name, size in plan.shared_state_bytes.items()
    )
    return (
        f"Of its variables a device holds {size_text(plan.memory.state_bytes)}. Shared out among "
        f"the replicas they would be {held}. The activations and gradients below are those of this "
        "program, with copies: those of another are known when that is planned."
    )


def _memory_table(plan: Plan) -> Table:
    table = Table(title="Memory of a device", title_justify="left")
    table.add_column("what")
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
    table.add_row("all", size_text(total), "100.0%")
    table.add_row("JAX gives a program", size_text(plan.memory.pool_bytes), "")
    table.add_row("the device has", size_text(plan.memory.device_bytes), "")
    if plan.memory.host_bytes:
        table.add_row("the host needs for variables", size_text(plan.memory.host_bytes), "")
    return table


def _reduction_table(plan: Plan) -> Table:
    table = Table(title="Sent between devices in a step", title_justify="left")
    table.add_column("what")
    for name in ("messages", "bytes", "behind products"):
        table.add_column(name, justify="right", no_wrap=True)
    messages: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    behind: Counter[str] = Counter()
    for one in plan.reductions:
        kind = f"{one.kind}{_among(plan, one)}"
        messages[kind] += one.times
        sizes[kind] += one.times * one.num_bytes
        behind[kind] += one.times * one.num_bytes if one.behind else 0
    for kind, count in messages.items():
        share = f"{behind[kind] / sizes[kind]:.0%}" if sizes[kind] else "-"
        shown = share if plan.is_scheduled else "not known"
        table.add_row(kind, str(count), size_text(sizes[kind]), shown)
    if not messages:
        table.add_row("nothing", "0", "0 B", "-")
    return table


def _among(plan: Plan, one: Reduction) -> str:
    target = plan.target
    whole = len(one.groups[0]) == target.num_devices if one.groups else not one.leaves_slice
    if target.num_groups == 1 and whole:
        return ""
    if whole:
        return ", all devices"
    group = one.groups[0] if one.groups else ()
    leaves = one.leaves_slice or len({place // target.devices_per_group for place in group}) > 1
    places = "slices" if target.shape else "hosts"
    return f", between {places}" if leaves else f", within {places}"


def _time_table(plan: Plan) -> Table:
    table = Table(title="Predicted, not measured: one step", title_justify="left")
    for name in ("devices", "computing", "sending", "hidden", "step", "at best", "efficiency"):
        table.add_column(name, justify="right", no_wrap=True)
    for time in plan.scaling:
        table.add_row(
            str(time.num_devices),
            time_text(time.compute_s),
            time_text(time.reduction_s),
            time_text(time.hidden_s),
            time_text(time.step_s),
            time_text(time.shortest_s),
            f"{time.efficiency:.2f}",
        )
    return table


def _assumption_lines(plan: Plan) -> list[str]:
    kind = plan.target.accelerator
    rates = ", ".join(
        f"{count_text(count)}FLOP in {dtype} at {count_text(kind.peak_flops_per_s(dtype))}FLOP/s"
        for dtype, count in plan.flops.items()
    )
    rates = rates or "none"
    bound = "products" if plan.products_s >= plan.memory_s else "memory"
    by_memory = (
        f"; {size_text(plan.accessed_bytes)} accessed would take {time_text(plan.memory_s)}, so "
        f"that {bound} bound it"
        if plan.compiler != "cpu"
        else "; the bytes that a step accesses are known of the compiler for the devices only"
    )
    pinned = (
        [
            f"In a step each device brings {size_text(plan.brought_bytes)} over from pinned memory "
            f"of the host, and puts {size_text(plan.put_back_bytes)} back. The times leave this "
            "out."
        ]
        if plan.brought_bytes
        else []
    )
    host = (
        [
            f"In a step each device is given {size_text(plan.from_host_bytes)} by the host, which "
            f"gets {size_text(plan.to_host_bytes)} from the first and updates its variables. The "
            "times leave this out."
        ]
        if plan.from_host_bytes or plan.to_host_bytes
        else []
    )
    return [
        f"Compiled for {plan.compiler.upper()}. Products of a device: {rates}{by_memory}.",
        f"{kind.name}: memory {count_text(kind.memory_bytes_per_s)}B/s, links "
        f"{count_text(kind.link_bytes_per_s)}B/s, network {count_text(kind.network_bytes_per_s)}"
        "B/s, each of one device in one direction.",
        "Assumed: " + "; ".join(plan.assumptions.lines()) + ".",
        "The batch of a device is the same on any number. 'hidden' is what the compiler's schedule "
        "sends behind products, 'at best' what could be. Input, kernel starts, stragglers, the "
        "memory of CUDA and of communication libraries, and fragmentation are left out.",
        *host,
        *pinned,
        *plan.notes,
    ]

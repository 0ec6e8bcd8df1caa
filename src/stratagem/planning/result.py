"""The result of planning: `Plan`, as data and as tables for the terminal."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import defaultdict
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stratagem.errors import invalid
from stratagem.logs import as_html, as_text, size_text
from stratagem.planning.memory import MemoryPlan
from stratagem.planning.schedule import Reduction, share_behind
from stratagem.planning.step_time import Assumptions, StepTime, for_any_size, predict_step
from stratagem.planning.targets import Target


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Plan:
    """Estimated memory, communication and time of a training step on a target.

    Args:
        target: the machine.
        title: name of the model, step or script.
        compiler: compiler that was used: "tpu", "gpu" or "cpu".
        is_refused: True if the compiler rejected the step because it does not fit.
        num_parameters: number of elements of all trainable variables.
        global_batch: number of examples over all devices.
        num_replicas: number of replicas that split the batch.
        shard_state: state sharded over the replicas; None for nothing.
        shared_state_bytes: bytes of variables per device under each `shard_state`, if variables
            are replicated.
        from_host_bytes: bytes per step from the host to each device, if variables are stored there.
        to_host_bytes: bytes per step to the host, which updates them.
        brought_bytes: bytes per step that each device copies from pinned host memory.
        put_back_bytes: bytes per step that each device copies back.
        memory: memory of one device.
        reductions: messages between devices in one step, in program order.
        is_scheduled: True if program order is execution order.
        flops: FLOPs of matrix products of one device, by operand dtype.
        accessed_bytes: bytes that one device reads and writes, as counted by the compiler.
        products_s: seconds that the matrix products take.
        memory_s: seconds that the memory accesses take.
        num_launches: number of kernels that a GPU starts per step; 0 if unknown.
        scaling: predicted steps on one replica up to all.
        assumptions: assumptions of the time prediction.
        notes: further remarks.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
        >>> model.compile("adam", "mse")
        >>> plan = sg.plan(model, (np.ones((16, 8)), np.ones((16, 2))), "8xH100")
        >>> plan.num_replicas, plan.per_device_batch, plan.num_parameters
        (8, 2, 18)
        >>> [time.num_devices for time in plan.scaling]
        [1, 2, 4, 8]

    Source: specific to Stratagem.
    """

    target: Target
    title: str
    compiler: str
    is_refused: bool
    num_parameters: int
    global_batch: int
    num_replicas: int
    shard_state: str | None
    shared_state_bytes: dict[str, int]
    from_host_bytes: int
    to_host_bytes: int
    brought_bytes: int
    put_back_bytes: int
    memory: MemoryPlan
    reductions: tuple[Reduction, ...]
    is_scheduled: bool
    flops: dict[str, float]
    accessed_bytes: float
    products_s: float
    memory_s: float
    num_launches: int
    scaling: tuple[StepTime, ...]
    assumptions: Assumptions
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<Plan: {headline(self)}. {verdict(self)}>"

    def __str__(self) -> str:
        return as_text(parts_of(self))

    def _repr_html_(self) -> str:
        return as_html(parts_of(self))

    @property
    def fits(self) -> bool:
        """True if a step fits in the memory that JAX gives to programs by default."""
        return self.memory.fits and not self.is_refused

    @property
    def step(self) -> StepTime:
        """Predicted step on all devices."""
        return self.scaling[-1]

    @property
    def devices_per_replica(self) -> int:
        """Number of devices per replica."""
        return self.target.num_devices // self.num_replicas

    @property
    def per_device_batch(self) -> int:
        """Number of examples per device, including padding; devices of one replica share them."""
        return -(-self.global_batch // self.num_replicas)

    @property
    def reduced_bytes(self) -> int:
        """Bytes that one device contributes to messages per step."""
        return round(sum(one.num_bytes * one.times for one in self.reductions))

    @property
    def hidden_share(self) -> float:
        """Fraction of these bytes sent while a device computes products."""
        return share_behind(self.reductions)

    def step_on(self, num_devices: int) -> StepTime:
        """Predicts the step on another number of devices of the same kind, without compiling.

        The batch per device, the number of messages and their sizes stay; only the time of each
        message is computed anew.

        Args:
            num_devices: at most the devices of one host or slice, or a multiple of them.

        Returns:
            The predicted step.

        Raises:
            ValueError: a number that does not fill hosts, slices or replicas, or a message that is
                sent in groups that span hosts or slices and are not all devices.
        """
        machine = self.target.of_size(max(num_devices, 1))
        if machine.num_devices != num_devices or num_devices % self.devices_per_replica:
            raise invalid(
                f"num_devices={num_devices!r} does not fill hosts, slices or replicas.",
                expected=f"at most {machine.devices_per_group}, or a multiple of it, in "
                f"replicas of {self.devices_per_replica}.",
                fix="pass a number of whole hosts or slices.",
            )
        return predict_step(
            machine,
            for_any_size(self.reductions, self.target),
            self.step.compute_s,
            self.assumptions,
            self.step.launch_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the whole plan as numbers, strings, lists and dicts, ready for JSON."""
        fields = json.loads(json.dumps(dataclasses.asdict(self)))
        fields["is_refused_by_compiler"] = fields.pop("is_refused")
        accelerator = fields["target"]["accelerator"]
        del accelerator["gpu_info"]
        for time, one in zip(fields["scaling"], self.scaling, strict=True):
            time |= {"step_s": one.step_s, "shortest_s": one.shortest_s}
            time["efficiency"] = one.efficiency
        fields["memory"]["total_bytes"] = self.memory.total_bytes
        return {
            **fields,
            "target": self.target.name,
            "num_devices": self.target.num_devices,
            "devices_per_replica": self.devices_per_replica,
            "fits": self.fits,
            "per_device_batch": self.per_device_batch,
            "reduced_bytes": self.reduced_bytes,
            "hidden_share": self.hidden_share,
            "accelerator": accelerator,
        }


# Tables of a plan, for the terminal.


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


def show_plan(plan: Plan, console: Console | None = None) -> None:
    """Prints a plan."""
    console = console or Console(highlight=False)
    styles = ["bold", "green" if plan.fits else "red"]
    parts = parts_of(plan)[: -len(plan.notes) or None]  # the assumptions have the notes, too
    for part, style in itertools.zip_longest(parts, styles):
        console.print(Text(part) if isinstance(part, str) else part, style=style)
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
    by_kind: defaultdict[str, list[Reduction]] = defaultdict(list)
    for one in plan.reductions:
        by_kind[f"{one.kind}{_scope_suffix(plan, one)}"].append(one)
    for kind, sent in by_kind.items():
        size = sum(one.times * one.num_bytes for one in sent)
        share = f"{share_behind(sent):.0%}" if size else "-"
        count = sum(one.times for one in sent)
        shown = share if plan.is_scheduled else "unknown"
        table.add_row(kind, f"{count:.4g}", size_text(size), shown)
    if not by_kind:
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


def _assumption_lines(plan: Plan) -> list[str]:
    kind = plan.target.accelerator
    rates = ", ".join(
        f"{count_text(count)}FLOP in {dtype} at {count_text(kind.peak_flops_per_s(dtype))}FLOP/s"
        for dtype, count in plan.flops.items()
    )
    by_memory = (
        f", {time_text(plan.products_s)} in all; {size_text(plan.accessed_bytes)} accessed take "
        f"{time_text(plan.memory_s)}. Each operation takes the longer of both"
        if plan.compiler != "cpu"
        else "; only the compiler for the devices reports the bytes that a step accesses"
    )
    lines = [
        f"Compiled for {plan.compiler.upper()}. Products per device: {rates or 'none'}{by_memory}.",
        f"{kind.name}: memory {count_text(kind.memory_bytes_per_s)}B/s, links "
        f"{count_text(kind.link_bytes_per_s)}B/s, network {count_text(kind.network_bytes_per_s)}"
        "B/s, per device and direction.",
    ]
    if plan.num_launches:
        launches = time_text(plan.step.launch_s)
        lines.append(f"'compute' includes {plan.num_launches} kernel starts per step, {launches}.")
    lines += [
        "Assumed: " + "; ".join(plan.assumptions.lines()) + ".",
        "The batch per device is constant. 'hidden' is communication that the compiler's schedule "
        "overlaps with products, 'best case' assumes full overlap. Input, stragglers, memory of "
        "CUDA and communication libraries, and fragmentation are excluded.",
    ]
    if plan.from_host_bytes or plan.to_host_bytes:
        lines.append(
            f"Each step sends {size_text(plan.from_host_bytes)} from the host to every device, and "
            f"{size_text(plan.to_host_bytes)} from the first device to the host, which updates "
            "its variables. The times exclude this."
        )
    if plan.brought_bytes:
        lines.append(
            f"Each step copies {size_text(plan.brought_bytes)} per device from pinned host memory, "
            f"and {size_text(plan.put_back_bytes)} back. The times exclude this."
        )
    return [*lines, *plan.notes]

"""Predictions for published rows, from programs that were compiled for eight devices.

The time of a pass is a straight line in the batch, through the two batches that were compiled. No
figure is fitted to a publication: rates, shares and latencies are the planner's defaults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.published_scaling.figures import Group, PublishedRow
from benchmarks.published_scaling.report import ScaledRow
from stratagem.planning.schedule import Reduction
from stratagem.planning.step_time import Assumptions, predict_step
from stratagem.planning.targets import ACCELERATORS, Target

__all__ = [
    "Program",
    "combined",
    "machine_of",
    "needed_batches",
    "predict_throughput",
    "scaled_rows",
]

_BYTES_PER_GBIT = 1e9 / 8
# One batch is enough if the others are at least this part of it.
_CLOSE = 0.6


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step, compiled for the devices of one host.

    Args:
        batch: examples per device.
        compute_s: seconds of compute on one device.
        launch_s: seconds of the starts of its kernels.
        reductions: messages, each among all devices of the host.
        compiler: compiler that was used: "gpu" or "cpu".
    """

    batch: int
    compute_s: float
    launch_s: float
    reductions: tuple[Reduction, ...]
    compiler: str

    @classmethod
    def of(cls, answer: Mapping[str, Any]) -> Program:
        """Creates it from the answer of `benchmarks.workers.planned_program`."""
        reductions = tuple(Reduction(behind=(), **one) for one in answer["reductions"])
        fields = ("batch", "compute_s", "launch_s", "compiler")
        return cls(reductions=reductions, **{field: answer[field] for field in fields})


def needed_batches(groups: Sequence[Group]) -> dict[tuple[str, str], list[int]]:
    """Returns the batches to compile for each program and accelerator: the ends of their range."""
    batches: dict[tuple[str, str], set[int]] = {}
    for group in groups:
        found = batches.setdefault((group.program, group.accelerator), set())
        found.update(row.batch for row in group.rows)
    return {
        key: [max(found)] if min(found) >= _CLOSE * max(found) else [min(found), max(found)]
        for key, found in batches.items()
    }


def machine_of(group: Group, num_devices: int) -> Target:
    """Returns the machine that a group was measured on, with its published network."""
    kind = ACCELERATORS[group.accelerator]
    network = group.network_gbit_per_s * _BYTES_PER_GBIT / group.devices_per_host
    kind = dataclasses.replace(
        kind,
        devices_per_host=group.devices_per_host,
        network_bytes_per_s=network or kind.network_bytes_per_s,
    )
    inside = min(num_devices, group.devices_per_host)
    return Target(kind, num_devices // inside, inside)


def predict_throughput(group: Group, row: PublishedRow, programs: Sequence[Program]) -> float:
    """Returns the predicted throughput of a row, in the group's unit.

    All passes but the last only compute. Sums beside the backward pass are hidden as far as the
    backward pass of the last one lasts.
    """
    compute_s = _at_batch([(one.batch, one.compute_s) for one in programs], row.batch)
    launch_s = _at_batch([(one.batch, one.launch_s) for one in programs], row.batch)
    step = predict_step(
        machine_of(group, row.devices),
        _messages(group, programs[-1].reductions),
        compute_s,
        Assumptions(),
        launch_s,
    )
    pass_s = compute_s + launch_s
    last_s = step.shortest_s if group.overlap == "backward" else pass_s + step.reduction_s
    num_examples = row.devices * row.batch * row.passes
    return num_examples * group.unit_count / ((row.passes - 1) * pass_s + last_s)


def _at_batch(points: Sequence[tuple[int, float]], batch: int) -> float:
    """Returns the value at a batch on the line through two points, or through one and zero."""
    (last, last_value) = points[-1]
    (first, first_value) = points[0] if len(points) > 1 else (0, 0.0)
    return first_value + (last_value - first_value) * (batch - first) / (last - first)


def _messages(group: Group, reductions: Sequence[Reduction]) -> list[Reduction]:
    if group.state == "sharded in hosts":
        return _between_hosts(group, reductions)
    return combined(reductions, group.message_bytes)


def _between_hosts(group: Group, reductions: Sequence[Reduction]) -> list[Reduction]:
    """Returns the messages within each host, and the sums of each device's shard between hosts."""
    size = group.devices_per_host
    host = (tuple(range(size)),)
    inside = [dataclasses.replace(one, groups=host) for one in reductions]
    between = [
        dataclasses.replace(
            one, kind="all-reduce", num_bytes=one.num_bytes // size, groups=(), leaves_slice=True
        )
        for one in reductions
        if one.kind == "reduce-scatter"
    ]
    return inside + between


def combined(reductions: Sequence[Reduction], message_bytes: int) -> list[Reduction]:
    """Combines all-reduces in their order, up to `message_bytes` each; none if that is 0."""
    messages: list[Reduction] = []
    for one in reductions:
        last = messages[-1] if messages else None
        if last and last.kind == one.kind == "all-reduce" and last.times == one.times:
            num_bytes = last.num_bytes + one.num_bytes
            if num_bytes <= message_bytes:
                messages[-1] = dataclasses.replace(last, num_bytes=num_bytes)
                continue
        messages.append(one)
    return messages


def scaled_rows(
    groups: Sequence[Group], programs: Mapping[tuple[str, str], Sequence[Program]]
) -> list[ScaledRow]:
    """Returns published and predicted rows of the groups whose programs were compiled."""
    rows: list[ScaledRow] = []
    for group in groups:
        compiled = programs.get((group.program, group.accelerator))
        if not compiled:
            continue
        smallest = group.smallest
        base = predict_throughput(group, smallest, compiled)
        for row in group.rows:
            predicted = predict_throughput(group, row, compiled)
            rows.append(
                ScaledRow(
                    group=group.title,
                    model=group.model,
                    hardware=group.hardware,
                    unit=group.unit,
                    is_complete=group.is_complete,
                    devices=row.devices,
                    batch=row.batch,
                    passes=row.passes,
                    published=row.throughput,
                    predicted=predicted,
                    published_scaling=row.throughput / smallest.throughput,
                    predicted_scaling=predicted / base,
                    device_ratio=row.devices / smallest.devices,
                )
            )
    return rows

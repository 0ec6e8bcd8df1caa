"""Step-time prediction by formula; nothing here is measured.

Each operation takes the longer of its products at the achieved rate and its bytes at the achieved
memory bandwidth (the roofline of Williams, Waterman and Patterson, 2009). On GPUs, the start of
each kernel adds a launch; TPUs read their program themselves. NVIDIA measured 3.8 us per kernel of
2.9 us in a stream, and 3.4 us in a CUDA graph, on a V100 (A. Gray, "Getting Started with CUDA
Graphs", developer.nvidia.com/blog/cuda-graphs, 2019). The default is the difference in a stream.

A ring all-reduce over n devices sends 2 (n - 1) / n of its bytes over each link, a reduce-scatter
or all-gather half of that. Over several hosts or slices it runs inside each, then between them on
each device's part, by recursive halving and doubling, then inside again (Thakur, Rabenseifner and
Gropp, 2005). Each hop of a ring, and each round between hosts, adds a latency; the rings of a TPU
run along the axes of its slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.errors import invalid
from stratagem.planning.schedule import OperationCost, Reduction
from stratagem.planning.targets import Target

# Two thirds of a training step's products are the backward pass, which can overlap communication.
BACKWARD_SHARE = 2 / 3
# Fraction of the whole array that each device sends, as a multiple of (n - 1) / n.
_SENT = {"all-reduce": 2.0, "reduce-scatter": 1.0, "all-gather": 1.0, "all-to-all": 1.0}


def _assumption(value: Any, text: str) -> Any:
    return dataclasses.field(default=value, metadata={"text": text})


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """Assumptions of a prediction, in addition to the accelerator's specifications.

    Args:
        compute_share: fraction of the peak rate that matrix products reach.
        memory_share: fraction of the memory bandwidth that is reached.
        link_share: fraction of the link and network bandwidth that is reached.
        link_latency_s: minimum seconds per hop inside a host or slice.
        network_latency_s: minimum seconds per round between hosts or slices. With Gloo that is a
            round trip, since it sends when the receiver is ready.
        launch_s: seconds that the start of a kernel adds on a GPU.
        link_bytes_per_s: bandwidth of a device inside a host or slice; None for the accelerator's.
        network_bytes_per_s: bandwidth of a device between them; None for the accelerator's.

    Example:
        >>> assumptions = sg.planning.Assumptions(compute_share=0.4)  # for sg.plan(assumptions=...)
        >>> assumptions.lines()[0]
        '0.4 of peak FLOP/s in matrix products'

    Source: specific to Stratagem.
    """

    compute_share: float = _assumption(0.5, "of peak FLOP/s in matrix products")
    memory_share: float = _assumption(0.8, "of memory bandwidth")
    link_share: float = _assumption(0.8, "of link and network bandwidth")
    link_latency_s: float = _assumption(2e-6, "seconds per hop within a host or slice")
    network_latency_s: float = _assumption(15e-6, "seconds per round between hosts or slices")
    launch_s: float = _assumption(0.9e-6, "seconds per kernel start on a GPU")
    link_bytes_per_s: float | None = _assumption(None, "bytes/s within a host or slice")
    network_bytes_per_s: float | None = _assumption(None, "bytes/s between hosts or slices")

    def lines(self) -> list[str]:
        """Returns one line per assumption, for a report."""
        return [
            f"{getattr(self, field.name):g} {field.metadata['text']}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        ]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Predicted time of one step; the batch per device does not depend on `num_devices`.

    Args:
        num_devices: number of devices.
        compute_s: seconds of compute.
        reduction_s: seconds of communication, without overlap.
        hidden_s: seconds of communication overlapped with compute by the compiler's schedule.
        most_hidden_s: seconds of communication that could overlap with compute at best.
        launch_s: seconds that the starts of kernels add.
    """

    num_devices: int
    compute_s: float
    reduction_s: float
    hidden_s: float
    most_hidden_s: float
    launch_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.compute_s + self.launch_s + self.reduction_s - self.hidden_s

    @property
    def shortest_s(self) -> float:
        """Seconds of the step in the best case, with full overlap."""
        return self.compute_s + self.launch_s + self.reduction_s - self.most_hidden_s

    @property
    def efficiency(self) -> float:
        """Step time on one device divided by this step time."""
        return (self.compute_s + self.launch_s) / self.step_s if self.step_s else 1.0


def compute_s(
    flops: Mapping[str, float], accessed_bytes: float, target: Target, assumed: Assumptions
) -> tuple[float, float]:
    """Returns seconds of a step's products and of its memory accesses; the longer one counts."""
    kind = target.accelerator
    products_s = sum(
        count / (kind.peak_flops_per_s(dtype) * assumed.compute_share)
        for dtype, count in flops.items()
    )
    return products_s, accessed_bytes / (kind.memory_bytes_per_s * assumed.memory_share)


def operations_s(
    costs: Sequence[OperationCost], target: Target, assumed: Assumptions, memory_scale: float = 1.0
) -> float:
    """Returns seconds of operations one after the other, each bound by products or by memory.

    `memory_scale` is the compiler's count of all bytes, divided by the sum of the costs' bytes.
    """
    total_s = 0.0
    for one in costs:
        times_s = compute_s({one.dtype: one.flops}, one.num_bytes, target, assumed)
        total_s += one.times * max(times_s[0], times_s[1] * memory_scale)
    return total_s


def message_s(reduction: Reduction, target: Target, assumed: Assumptions) -> float:
    """Returns the seconds of one message, 0 on one device."""
    inside, between = _group_sizes(reduction, target)
    kind = target.accelerator
    link_rate = assumed.link_bytes_per_s or kind.link_bytes_per_s
    network_rate = assumed.network_bytes_per_s or kind.network_bytes_per_s
    if reduction.kind == "collective-permute":
        rate, latency_s = (
            (link_rate, assumed.link_latency_s)
            if between == 1
            else (network_rate, assumed.network_latency_s)
        )
        return latency_s + reduction.num_bytes / (rate * assumed.link_share)
    sent = _SENT[reduction.kind]
    hops = target.of_size(inside).num_hops
    inside_s = (inside - 1) / inside * reduction.num_bytes / link_rate
    between_s = (between - 1) / between * reduction.num_bytes / inside / network_rate
    latency_s = hops * assumed.link_latency_s + math.log2(between) * assumed.network_latency_s
    return sent * ((inside_s + between_s) / assumed.link_share + latency_s)


def _group_sizes(reduction: Reduction, target: Target) -> tuple[int, int]:
    """Returns how many devices per host or slice take part, and how many hosts or slices."""
    if reduction.leaves_slice:
        return 1, target.num_groups
    if not reduction.groups:
        return target.devices_per_group, target.num_groups
    first = next((group for group in reduction.groups if 0 in group), reduction.groups[0])
    # Leave out devices that a smaller machine does not have.
    group = [device for device in first if device < target.num_devices] or [0]
    groups = {device // target.devices_per_group for device in group}
    return max(len(group) // len(groups), 1), len(groups)


def for_any_size(reductions: Sequence[Reduction], target: Target) -> list[Reduction]:
    """Returns the messages of a target's program as they are on any number of devices.

    Groups of all devices grow with the machine; groups within a host or slice stay. Raises
    ValueError for other groups.
    """
    found: list[Reduction] = []
    for one in reductions:
        group = () if one.leaves_slice or not one.groups else one.groups[0]
        hosts = {device // target.devices_per_group for device in group}
        if len(group) == target.num_devices:
            one = dataclasses.replace(one, groups=())
        elif len(hosts) > 1:
            raise invalid(
                f"{one.name!r} is sent in groups of {len(group)} devices of {len(hosts)} hosts "
                f"or slices, out of {target.num_devices} devices.",
                expected="messages among all devices, or within hosts or slices.",
                fix="plan for the machine itself: sg.plan(..., target).",
            )
        found.append(one)
    return found


def predict_step(
    target: Target,
    reductions: Sequence[Reduction],
    computing_s: float,
    assumed: Assumptions,
    launch_s: float = 0.0,
) -> StepTime:
    """Predicts one step of which the starts of kernels take `launch_s`.

    Compute can hide the communication that overlaps it only while some is left: the backward pass
    is two thirds of it.
    """
    if target.num_devices == 1:
        return StepTime(1, computing_s, 0.0, 0.0, 0.0, launch_s)
    times = [one.times * message_s(one, target, assumed) for one in reductions]
    backward_s = BACKWARD_SHARE * computing_s
    behind_s = sum(time for one, time in zip(reductions, times, strict=True) if one.behind)
    return StepTime(
        target.num_devices,
        computing_s,
        sum(times),
        min(behind_s, backward_s),
        min(sum(times), backward_s),
        launch_s,
    )


def predict_scaling(
    target: Target,
    reductions: Sequence[Reduction],
    computing_s: float,
    assumed: Assumptions,
    devices_per_replica: int = 1,
    launch_s: float = 0.0,
) -> list[StepTime]:
    """Predicts the step for increasing numbers of devices, from one replica up to all."""
    return [
        predict_step(target.of_size(size), reductions, computing_s, assumed, launch_s)
        for size in target.sizes()
        if size % devices_per_replica == 0
    ]

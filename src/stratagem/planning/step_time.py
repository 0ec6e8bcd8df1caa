"""How long a step takes, as a formula of stated figures: nothing here is measured.

Computing takes the longer of its operations at the reached rate and its bytes at the reached rate
of the memory (the roofline of Williams, Waterman and Patterson, 2009). An all-reduce in a ring of n
sends 2 (n - 1) / n of its bytes over each link, a reduce-scatter and an all-gather half of that;
over several hosts or slices it runs inside each, then between them on the part that each device
has, by recursive halving and doubling, then inside again (Thakur, Rabenseifner and Gropp, 2005).
Each hop of a ring, and each round between hosts, takes a latency; the rings of a TPU run along the
axes of its slice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from stratagem.planning.reductions import Reduction
from stratagem.planning.targets import Target

__all__ = [
    "Assumptions",
    "StepTime",
    "compute_s",
    "message_s",
    "predict_scaling",
    "predict_step",
]

# Of a training step's products two thirds are the backward pass, behind which sums can travel.
_BACKWARD_SHARE = 2 / 3
# How much of the whole array each device sends, as a multiple of (n - 1) / n.
_SENT = {"all-reduce": 2.0, "reduce-scatter": 1.0, "all-gather": 1.0, "all-to-all": 1.0}


def _assumed(value: float, text: str) -> float:
    return dataclasses.field(default=value, metadata={"text": text})


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """What a prediction takes for given beside the figures of the accelerator."""

    compute_share: float = _assumed(0.5, "of the peak rate is reached by matrix products")
    memory_share: float = _assumed(0.8, "of the memory's rate is reached")
    link_share: float = _assumed(0.8, "of the rate of links and network is reached")
    link_latency_s: float = _assumed(2e-6, "seconds a hop inside a host or slice takes at least")
    network_latency_s: float = _assumed(15e-6, "seconds a round between them takes at least")

    def lines(self) -> list[str]:
        """Returns a line for each, as a report prints them."""
        return [
            f"{getattr(self, field.name):g} {field.metadata['text']}"
            for field in dataclasses.fields(self)
        ]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """One step on so many devices, the batch of each as large on any number.

    Args:
        num_devices: how many.
        compute_s: computing.
        reduction_s: what is sent between devices, if nothing ran meanwhile.
        hidden_s: of that what travels behind computing, as the schedule has it.
        most_hidden_s: of it what could, if every message began as soon as its array is there.
    """

    num_devices: int
    compute_s: float
    reduction_s: float
    hidden_s: float
    most_hidden_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.reduction_s - self.hidden_s

    @property
    def shortest_s(self) -> float:
        """The step, if as much travels behind computing as can."""
        return self.compute_s + self.reduction_s - self.most_hidden_s

    @property
    def efficiency(self) -> float:
        """Time on one device over that on all."""
        return self.compute_s / self.step_s if self.step_s else 1.0


def compute_s(
    flops: Mapping[str, float], accessed_bytes: float, target: Target, assumed: Assumptions
) -> tuple[float, float]:
    """Returns how long the products of a step take, and how long its bytes.

    Args:
        flops: of its products, by dtype.
        accessed_bytes: that it reads and writes.
        target: the devices.
        assumed: which share of the rates is reached.

    Returns:
        Both times of one device; the step takes the longer one.
    """
    kind = target.accelerator
    products_s = sum(
        count / (kind.peak_flops_per_s(dtype) * assumed.compute_share)
        for dtype, count in flops.items()
    )
    return products_s, accessed_bytes / (kind.memory_bytes_per_s * assumed.memory_share)


def message_s(reduction: Reduction, target: Target, assumed: Assumptions) -> float:
    """Returns how long one message takes, each time it is sent.

    Args:
        reduction: the message; its groups say which devices exchange with one another.
        target: the devices.
        assumed: shares and latencies.

    Returns:
        Seconds; 0 on one device.
    """
    inside, between = _members(reduction, target)
    kind = target.accelerator
    if reduction.kind == "collective-permute":
        rate, latency_s = (
            (kind.link_bytes_per_s, assumed.link_latency_s)
            if between == 1
            else (kind.network_bytes_per_s, assumed.network_latency_s)
        )
        return latency_s + reduction.num_bytes / (rate * assumed.link_share)
    sent = _SENT[reduction.kind]
    hops = target.of_size(inside).num_hops
    inside_s = (inside - 1) / inside * reduction.num_bytes / kind.link_bytes_per_s
    between_s = (between - 1) / between * reduction.num_bytes / inside / kind.network_bytes_per_s
    latency_s = hops * assumed.link_latency_s + math.log2(between) * assumed.network_latency_s
    return sent * ((inside_s + between_s) / assumed.link_share + latency_s)


def _members(reduction: Reduction, target: Target) -> tuple[int, int]:
    """How many devices of a host or slice exchange, and of how many hosts or slices."""
    if reduction.leaves_slice:
        return 1, target.num_groups
    if not reduction.groups:
        return target.devices_per_group, target.num_groups
    first = next((group for group in reduction.groups if 0 in group), reduction.groups[0])
    # Of a smaller machine those that are there.
    group = [device for device in first if device < target.num_devices] or [0]
    places = {device // target.devices_per_group for device in group}
    return max(len(group) // len(places), 1), len(places)


def predict_step(
    target: Target,
    reductions: Sequence[Reduction],
    computing_s: float,
    assumed: Assumptions,
) -> StepTime:
    """Predicts one step.

    A message that runs behind products is hidden as long as there is computing left to hide it: the
    backward pass is two thirds of it.

    Args:
        target: the devices.
        reductions: what the step sends, with what runs behind each.
        computing_s: of one device.
        assumed: shares and latencies.

    Returns:
        The times.
    """
    if target.num_devices == 1:
        return StepTime(1, computing_s, 0.0, 0.0, 0.0)
    times = [one.times * message_s(one, target, assumed) for one in reductions]
    backward_s = _BACKWARD_SHARE * computing_s
    behind_s = sum(time for one, time in zip(reductions, times, strict=True) if one.behind)
    return StepTime(
        target.num_devices,
        computing_s,
        sum(times),
        min(behind_s, backward_s),
        min(sum(times), backward_s),
    )


def predict_scaling(
    target: Target,
    reductions: Sequence[Reduction],
    computing_s: float,
    assumed: Assumptions,
    devices_per_replica: int = 1,
) -> list[StepTime]:
    """Predicts the step on 1 replica up to all, each with a batch of the same size.

    Args:
        target: the devices.
        reductions: of the step on all of them.
        computing_s: of one device.
        assumed: shares and latencies.
        devices_per_replica: of which any machine has a multiple.

    Returns:
        The times, by rising numbers of devices.
    """
    return [
        predict_step(target.of_size(size), reductions, computing_s, assumed)
        for size in target.sizes()
        if size % devices_per_replica == 0
    ]

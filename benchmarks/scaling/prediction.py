"""How long a training step takes on many GPUs, as a formula: nothing here is measured.

Computing takes at least its FLOPs at the reached rate, and at most the longer of that and of its
bytes at the reached rate of the memory (the roofline of Williams, Waterman and Patterson, 2009):
at most, because a compiler for GPUs fuses more than the one that counted the bytes. A message costs
a latency and its bytes over the bandwidth, and an all-reduce what its algorithm sends (Thakur,
Rabenseifner and Gropp, 2005): inside a host a ring, which moves 2(n - 1)/n of the bytes over the
link of each GPU, as NCCL's bus bandwidth counts them; between hosts recursive halving and doubling
of the part that each GPU of a host has, with 2 log2(hosts) messages, as many as NCCL's trees take.
How much is sent while gradients are still computed is not known either. So efficiency has two
bounds: the shortest computing with nothing hidden behind it, the longest with all of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.scaling.hardware import GpuCluster
from benchmarks.scaling.programs import Reduction, StepProgram

__all__ = ["Prediction", "all_reduce_s", "compute_s", "messages_bytes", "predict"]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One step of a workload on so many GPUs, the batch of each as large as on one.

    Args:
        num_gpus: how many.
        shortest_compute_s: computing, bound by FLOPs.
        longest_compute_s: computing, bound by FLOPs or by memory.
        exchange_s: summing gradients.
    """

    num_gpus: int
    shortest_compute_s: float
    longest_compute_s: float
    exchange_s: float

    @property
    def lowest_efficiency(self) -> float:
        return self.shortest_compute_s / (self.shortest_compute_s + self.exchange_s)

    @property
    def highest_efficiency(self) -> float:
        return self.longest_compute_s / max(self.longest_compute_s, self.exchange_s)


def predict(step: StepProgram, num_gpus: int, cluster: GpuCluster) -> Prediction:
    """Predicts a step on a number of GPUs that fill their hosts, or fit into one.

    Raises:
        ValueError: another number.
    """
    sent = messages_bytes(step.reductions, cluster.combined_bytes)
    exchange_s = sum(all_reduce_s(num_bytes, num_gpus, cluster) for num_bytes in sent)
    return Prediction(num_gpus, *compute_s(step, cluster), exchange_s)


def compute_s(step: StepProgram, cluster: GpuCluster) -> tuple[float, float]:
    """Returns how long one GPU computes, at least and at most."""
    flops_s = step.flops / (cluster.flops_per_s(step.dtype) * cluster.compute_share)
    bytes_s = step.accessed_bytes / (cluster.memory_bytes_per_s * cluster.memory_share)
    return flops_s, max(flops_s, bytes_s)


def messages_bytes(reductions: Sequence[Reduction], combined_bytes: float) -> list[int]:
    """Returns the sizes of the all-reduces that are left when adjacent_groups are combined.

    Args:
        reductions: in the program's order.
        combined_bytes: the most that is combined; what is larger travels alone.
    """
    sizes: list[int] = []
    last_dtype = None
    for reduction in reductions:
        fits = bool(sizes) and sizes[-1] + reduction.num_bytes <= combined_bytes
        if fits and reduction.dtype == last_dtype:
            sizes[-1] += reduction.num_bytes
        else:
            sizes.append(reduction.num_bytes)
        last_dtype = reduction.dtype
    return sizes


def all_reduce_s(num_bytes: float, num_gpus: int, cluster: GpuCluster) -> float:
    """Returns how long one all-reduce takes; nothing on one GPU.

    Raises:
        ValueError: a number of GPUs that neither fits into a host nor fills several.
    """
    if num_gpus < 1 or (num_gpus > cluster.gpus_per_host and num_gpus % cluster.gpus_per_host):
        raise ValueError(
            f"{num_gpus} GPUs in hosts of {cluster.gpus_per_host}. Expected: at most one host, or "
            "full hosts. Ask for a multiple."
        )
    if num_gpus == 1:
        return 0.0
    on_host = min(num_gpus, cluster.gpus_per_host)
    num_hosts = num_gpus // on_host
    inside_s = _there_and_back_s(
        on_host,
        num_bytes / (cluster.nvlink_bytes_per_s * cluster.link_share),
        (on_host - 1) * cluster.nvlink_latency_s,
    )
    between_s = _there_and_back_s(
        num_hosts,
        num_bytes / on_host / (cluster.network_bytes_per_s * cluster.link_share),
        math.log2(num_hosts) * cluster.network_latency_s,
    )
    return cluster.collective_s + inside_s + between_s


def _there_and_back_s(num_members: int, whole_s: float, latency_s: float) -> float:
    """A reduce-scatter and an all-gather: each moves all but the own part once."""
    return 2 * (latency_s + (num_members - 1) / num_members * whole_s)

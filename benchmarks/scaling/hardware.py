"""GPUs in hosts as numbers: what the prediction takes from data sheets, and what it assumes."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Constant", "GpuCluster", "constants_of"]

_H100 = "NVIDIA H100 data sheet, SXM5, dense"
_DGX = "NVIDIA DGX H100 data sheet"
_NCCL = "NCCL, src/graph/tuning.cc: hwLat and baseLat of tree, LL128"


def _figure(value: float, unit: str, text: str, source: str) -> Any:
    metadata = {"unit": unit, "text": text, "source": source}
    return dataclasses.field(default=value, metadata=metadata)


@dataclasses.dataclass(frozen=True)
class GpuCluster:
    """Hosts of eight H100 SXM5, as in a DGX H100; rates and times are of one GPU.

    Every field carries its text and its source: `constants_of` lists them.
    """

    gpus_per_host: int = _figure(8, "", "GPUs of a host", _DGX)
    bf16_flops_per_s: float = _figure(989.4e12, "FLOP/s", "matrix products in bfloat16", _H100)
    tf32_flops_per_s: float = _figure(
        494.7e12, "FLOP/s", "matrix products in float32, which XLA computes in TF32", _H100
    )
    memory_bytes_per_s: float = _figure(3.35e12, "B/s", "memory of a GPU", _H100)
    nvlink_bytes_per_s: float = _figure(
        450e9, "B/s", "NVLink, one direction", "NVIDIA H100 data sheet: 900 GB/s for both"
    )
    network_bytes_per_s: float = _figure(
        50e9, "B/s", "InfiniBand of a GPU, one direction", f"{_DGX}: a port of 400 Gb/s a GPU"
    )
    collective_s: float = _figure(4.4e-6, "s", "starting an all-reduce", _NCCL)
    nvlink_latency_s: float = _figure(1.2e-6, "s", "a message inside a host", _NCCL)
    network_latency_s: float = _figure(8.5e-6, "s", "a message between hosts", _NCCL)
    combined_bytes: int = _figure(
        30 * 2**20 + 7,
        "B",
        "all-reduces are combined up to",
        "XLA, kDefaultAllReduceCombineThreshold (service/collective_utils.h)",
    )
    compute_share: float = _figure(0.5, "", "reached of the FLOP/s", "assumed")
    memory_share: float = _figure(0.8, "", "reached of the memory's rate", "assumed")
    link_share: float = _figure(0.8, "", "reached of NVLink and InfiniBand", "assumed")

    def flops_per_s(self, dtype: str) -> float:
        """Returns the peak for products in a dtype.

        Raises:
            ValueError: another dtype than bfloat16 and float32.
        """
        rates = {"bfloat16": self.bf16_flops_per_s, "float32": self.tf32_flops_per_s}
        if dtype not in rates:
            raise ValueError(
                f"No rate for products in {dtype!r}. Expected: one of {', '.join(rates)}. "
                "Add a figure and its source."
            )
        return rates[dtype]


@dataclasses.dataclass(frozen=True)
class Constant:
    """One figure of a cluster, with where it comes from."""

    name: str
    value: float
    unit: str
    text: str
    source: str


def constants_of(cluster: GpuCluster) -> list[Constant]:
    """Returns every figure that the prediction uses."""
    return [
        Constant(name=field.name, value=getattr(cluster, field.name), **field.metadata)
        for field in dataclasses.fields(cluster)
    ]

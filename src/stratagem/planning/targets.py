"""Planning targets by name ("8xH100", "v5e:4x4"), and what vendors publish of accelerators."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from stratagem.devices.finding import AbstractDevice, AbstractTopology
from stratagem.errors import explain, invalid

# Specifications of accelerators as published by their vendors; nothing here is measured.
#
# Sources, cited at each figure:
#
# - [XLA] openxla/xla, xla/backends/gpu/target_config/specs: device properties reported by drivers.
# - [H100] NVIDIA H100 data sheet, SXM5, without sparsity. [H200], [A100], [B200], [L4]: likewise.
# - [DGX] NVIDIA DGX A100, DGX H100 and DGX B200 data sheets: network adapters of a host.
# - [TPU] cloud.google.com/tpu/docs, the pages v4, v5e, v5p and v6e, "key chip specifications".
# - [BOOK] jax-ml.github.io/scaling-book, "How to think about TPUs": network bytes per chip.


_GIB = 2**30
_TERA = 1e12
_GIGA = 1e9

# On GPUs, JAX's pool takes three quarters of the memory (XLA_PYTHON_CLIENT_MEM_FRACTION). On TPUs,
# XLA leaves all but about one fortieth to the program (15.75 of 16 GiB on a v5e).
_GPU_POOL_SHARE = 0.75
_TPU_POOL_SHARE = 0.975


@dataclasses.dataclass(frozen=True, kw_only=True)
class Accelerator:
    """Specifications of one device; link and network rates are per direction.

    Args:
        name: name used in targets, such as "H100".
        platform: "gpu" or "tpu".
        device_kind: `jax.Device.device_kind`.
        memory_bytes: memory of one device.
        pool_share: fraction of the memory that JAX gives to programs by default.
        flops_per_s: peak rate of matrix products by operand dtype. float32 runs as JAX runs it by
            default: TF32 on GPUs, bfloat16 on TPUs.
        memory_bytes_per_s: bandwidth of the device memory.
        link_bytes_per_s: bandwidth to the devices of the same host (GPU) or slice (TPU).
        network_bytes_per_s: one device's share of the network between hosts or slices.
        devices_per_host: number of devices per host.
        gpu_info: device properties that XLA needs to compile for a GPU without one; empty for
            TPUs.
    """

    name: str
    platform: str
    device_kind: str
    memory_bytes: int
    pool_share: float
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    link_bytes_per_s: float
    network_bytes_per_s: float
    devices_per_host: int
    gpu_info: Mapping[str, int | float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def pool_bytes(self) -> int:
        """Memory that JAX gives to programs by default."""
        return int(self.memory_bytes * self.pool_share)

    def peak_flops_per_s(self, dtype: str) -> float:
        """Returns the peak rate of matrix products of a dtype; unlisted dtypes use float32's."""
        return self.flops_per_s.get(dtype, self.flops_per_s["float32"])


def _accelerator(
    name: str,
    device_kind: str,
    memory_bytes: int,
    *,
    bfloat16: float,
    memory: float,
    link: float,
    network: float,
    devices_per_host: int = 8,
    tf32: float | None = None,
    info: Mapping[str, int | float] | None = None,
) -> Accelerator:
    """Returns a GPU if it has `info`, else a TPU; rates are in TFLOP/s and GB/s."""
    return Accelerator(
        name=name,
        platform="gpu" if info else "tpu",
        device_kind=device_kind,
        memory_bytes=memory_bytes,
        pool_share=_GPU_POOL_SHARE if info else _TPU_POOL_SHARE,
        flops_per_s={
            "bfloat16": bfloat16 * _TERA,
            "float16": bfloat16 * _TERA,
            "float32": (tf32 or bfloat16) * _TERA,
        },
        memory_bytes_per_s=memory * _GIGA,
        link_bytes_per_s=link * _GIGA,
        network_bytes_per_s=network * _GIGA,
        devices_per_host=devices_per_host,
        gpu_info=info or {},
    )


def _info(
    major: int, minor: int, cores: int, fpus: int, clock_ghz: float, l2_bytes: int, shared: int
) -> dict[str, int | float]:
    """Returns [XLA] properties of a GPU; `shared` is shared memory per multiprocessor, in bytes."""
    return {
        "major": major,
        "minor": minor,
        "core_count": cores,
        "fpus_per_core": fpus,
        "clock_rate_ghz": clock_ghz,
        "l2_cache_size": l2_bytes,
        "shared_memory_per_core": shared,
    }


_ALL = (
    _accelerator(
        "H100",
        "NVIDIA H100 80GB HBM3",
        84_942_979_072,  # [XLA] h100_sxm
        bfloat16=989.4,  # [H100]
        tf32=494.7,  # [H100]
        memory=3352.3,  # [XLA]; [H100] says 3.35 TB/s
        link=450,  # [H100] NVLink: 900 GB/s for both directions
        network=50,  # [DGX] H100: one 400 Gb/s adapter per GPU
        info=_info(9, 0, 132, 128, 1.98, 52_428_800, 233_472),
    ),
    _accelerator(
        "H200",
        "NVIDIA H200",  # as the card says it
        151_397_597_184,  # [XLA] h200
        bfloat16=989.4,  # [H200]
        tf32=494.7,  # [H200]
        memory=4800,  # [H200]
        link=450,  # [H200] NVLink: 900 GB/s for both directions
        network=50,  # as in a DGX H100
        info=_info(9, 0, 132, 128, 1.98, 52_428_800, 233_472),
    ),
    _accelerator(
        "A100",
        "NVIDIA A100-SXM4-80GB",
        85_100_068_864,  # [XLA] a100_sxm_80
        bfloat16=312,  # [A100]
        tf32=156,  # [A100]
        memory=2039,  # [A100], 80 GB
        link=300,  # [A100] NVLink: 600 GB/s for both directions
        network=25,  # [DGX] A100: one 200 Gb/s adapter per GPU
        info=_info(8, 0, 108, 64, 1.41, 41_943_040, 167_936),
    ),
    _accelerator(
        "B200",
        "NVIDIA B200",
        191_514_411_008,  # [XLA] b200
        bfloat16=2250,  # [B200]: half of the 4.5 PFLOP/s of FP8, without sparsity
        tf32=1125,  # [B200]
        memory=7672.3,  # [XLA]; [B200] says up to 8 TB/s
        link=900,  # [B200] NVLink: 1.8 TB/s for both directions
        network=50,  # [DGX] B200: one 400 Gb/s adapter per GPU
        info=_info(10, 0, 148, 128, 1.965, 132_644_864, 233_472),
    ),
    _accelerator(
        "L4",
        "NVIDIA L4",
        24_000_000_000,  # [L4] 24 GB
        bfloat16=121,  # [L4]: half of the 242 TFLOP/s with sparsity
        tf32=60,  # [L4]: half of the 120 TFLOP/s with sparsity
        memory=300,  # [L4]
        link=32,  # [L4] has no NVLink: PCIe 4.0 x16
        network=1.5625,  # assumed: the 100 Gb/s of a g2-standard-96 of Google Cloud for 8 GPUs
        info=_info(8, 9, 58, 128, 2.04, 50_331_648, 102_400),
    ),
    _accelerator(
        "v4",
        "TPU v4",
        32 * _GIB,  # [TPU]
        bfloat16=275,  # [TPU]
        memory=1200,  # [TPU]
        link=300,  # [TPU] interconnect: 2400 Gb/s per chip
        network=6.25,  # assumed as v5p
        devices_per_host=4,  # [TPU]
    ),
    _accelerator(
        "v5e",
        "TPU v5 lite",
        16 * _GIB,  # [TPU]
        bfloat16=197,  # [TPU]
        memory=819,  # [TPU]
        link=200,  # [TPU] interconnect: 1600 Gb/s per chip
        network=3.125,  # [TPU] two adapters of 100 Gb/s for the 8 chips of a host
        devices_per_host=8,  # [TPU]
    ),
    _accelerator(
        "v5p",
        "TPU v5",
        95 * _GIB,  # [TPU]
        bfloat16=459,  # [TPU]
        memory=2765,  # [TPU]
        link=600,  # [TPU] interconnect: 4800 Gb/s per chip
        network=6.25,  # [BOOK]
        devices_per_host=4,  # [TPU]
    ),
    _accelerator(
        "v6e",
        "TPU v6 lite",
        32 * _GIB,  # [TPU]
        bfloat16=918,  # [TPU]
        memory=1600,  # [TPU]; an older edition says 1640
        link=400,  # [TPU] interconnect: 800 GB/s for both directions
        network=12.5,  # [TPU] four adapters of 200 Gb/s for the 8 chips of a host
        devices_per_host=8,  # [TPU]
    ),
)

ACCELERATORS: Mapping[str, Accelerator] = {accelerator.name: accelerator for accelerator in _ALL}


# Planning targets by name: "8xH100", "v5e:4x4", "2xv5e:4x4".


_GPUS = re.compile(r"(?:(\d+)x)?([a-z]\w*)", re.IGNORECASE)
_SLICES = re.compile(r"(?:(\d+)x)?(v\d\w*):(\d+(?:x\d+)*)", re.IGNORECASE)
_BY_NAME = {name.lower(): kind for name, kind in ACCELERATORS.items()}


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of devices of one kind.

    Args:
        accelerator: kind of the devices.
        num_groups: number of GPU hosts, or of TPU slices.
        devices_per_group: number of devices per host or slice, connected by fast links.
        shape: shape of a slice; empty for GPUs.
    """

    accelerator: Accelerator
    num_groups: int
    devices_per_group: int
    shape: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        """Total number of devices."""
        return self.num_groups * self.devices_per_group

    @property
    def num_hosts(self) -> int:
        """Number of hosts, and of processes, one per host."""
        return -(-self.num_devices // self.accelerator.devices_per_host)

    @property
    def name(self) -> str:
        """The name, as accepted by `parse_target`."""
        if not self.shape:
            return f"{self.num_devices}x{self.accelerator.name}"
        slice_name = f"{self.accelerator.name}:{'x'.join(map(str, self.shape))}"
        return slice_name if self.num_groups == 1 else f"{self.num_groups}x{slice_name}"

    @property
    def num_hops(self) -> int:
        """Number of hops from one device of a host or slice to all others, along rings."""
        if self.accelerator.platform == "gpu":
            return self.devices_per_group - 1
        shape = self.shape or (math.isqrt(self.devices_per_group - 1) + 1,) * 2
        return min(sum(size - 1 for size in shape), self.devices_per_group - 1)

    @property
    def topology(self) -> AbstractTopology:
        """Topology of abstract devices for a strategy."""
        kind, per_host = self.accelerator, self.accelerator.devices_per_host
        devices: Any = tuple(
            AbstractDevice(
                id=index,
                platform=kind.platform,
                device_kind=kind.device_kind,
                process_index=index // per_host,
                slice_index=index // self.devices_per_group,
            )
            for index in range(self.num_devices)
        )
        return AbstractTopology(devices)

    def of_size(self, num_devices: int) -> Target:
        """Returns a smaller or larger machine of the same kind, to study scaling.

        Args:
            num_devices: number of devices: at most one group, or a multiple of it.

        Returns:
            The machine; a part of a slice has no shape.
        """
        inside = min(num_devices, self._largest_group)
        shape = self.shape if inside == self.devices_per_group else ()
        return Target(self.accelerator, num_devices // inside, inside, shape)

    @property
    def _largest_group(self) -> int:
        """Number of devices per full host or slice; a single host of GPUs may not be full."""
        if self.num_groups > 1 or self.accelerator.platform == "tpu":
            return self.devices_per_group
        return max(self.devices_per_group, self.accelerator.devices_per_host)

    def sizes(self) -> list[int]:
        """Returns numbers of devices from 1 to all: powers of two, then full groups."""
        inside = [1]
        while inside[-1] * 2 < self.devices_per_group:
            inside.append(inside[-1] * 2)
        groups = [1]
        while groups[-1] * 2 < self.num_groups:
            groups.append(groups[-1] * 2)
        numbers = {*inside, *(group * self.devices_per_group for group in groups)}
        return sorted(numbers | {self.num_devices})


def parse_target(text: str) -> Target:
    """Parses the name of a machine.

    Args:
        text: a number of GPUs ("8xH100"), a TPU slice ("v5e:4x4") or several ("2xv5e:4x4").

    Returns:
        The machine.

    Raises:
        TypeError: `text` is not a string.
        ValueError: an unknown accelerator, or GPUs that do not fill whole hosts.
    """
    if not isinstance(text, str):
        raise TypeError(
            explain(
                f"target={text!r} is of type {type(text).__name__}.",
                expected='a name such as "8xH100".',
                fix="pass the name of the machine as a string.",
            )
        )
    hosts, slices = _GPUS.fullmatch(text.strip()), _SLICES.fullmatch(text.strip())
    found = slices or hosts
    kind = _BY_NAME.get(found[2].lower()) if found else None
    if found is None or kind is None or (slices and kind.platform != "tpu"):
        gpus = ", ".join(one.name for one in _ALL if one.platform == "gpu")
        tpus = ", ".join(one.name for one in _ALL if one.platform == "tpu")
        raise invalid(
            f"target={text!r} is not a known machine.",
            expected=f'a number of GPUs such as "8xH100" ({gpus}), a TPU slice such as "v5e:4x4", '
            f'or several such as "2xv5e:4x4" ({tpus}).',
            fix="use a listed accelerator.",
        )
    if not slices and kind.platform == "tpu":
        raise invalid(
            f"target={text!r} names a TPU without the shape of its slice.",
            expected=f'a shape, since the links depend on it: "{kind.name}:4x4".',
            fix="append a colon and the TPU topology.",
        )
    count, per_host = int(found[1] or 1), kind.devices_per_host
    shape = tuple(map(int, slices[3].split("x"))) if slices else ()
    if not count or not all(shape):
        raise invalid(
            f"target={text!r} has no devices.",
            expected="at least one.",
            fix='use a number above 0, such as "8xH100".',
        )
    if slices:
        return Target(kind, count, math.prod(shape), shape)
    if count > per_host and count % per_host:
        raise invalid(
            f"target={text!r}: {count} GPUs do not fill hosts of {per_host}.",
            expected=f"at most {per_host} GPUs, or a multiple of {per_host}.",
            fix=f"use {count - count % per_host} or {count + per_host - count % per_host}.",
        )
    inside = min(count, per_host)
    return Target(kind, count // inside, inside)

"""Machines to plan for, by name: "8xH100", "v5e:4x4", "2xv5e:4x4"."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from stratagem.messages import explain
from stratagem.planning.accelerators import ACCELERATORS, Accelerator
from stratagem.topology.absent import AbsentDevice, AbsentTopology

__all__ = ["Target", "parse_target"]

_GPUS = re.compile(r"(?:(\d+)x)?([a-z]\w*)", re.IGNORECASE)
_SLICES = re.compile(r"(?:(\d+)x)?(v\d\w*):(\d+(?:x\d+)*)", re.IGNORECASE)
_NAMES = {name.lower(): name for name in ACCELERATORS}


@dataclasses.dataclass(frozen=True)
class Target:
    """So many devices of one kind.

    Args:
        accelerator: the kind.
        num_groups: hosts of GPUs, or slices of a TPU.
        devices_per_group: that are joined by the fast links.
        shape: of a slice; empty for GPUs.
    """

    accelerator: Accelerator
    num_groups: int
    devices_per_group: int
    shape: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        """How many devices, and replicas."""
        return self.num_groups * self.devices_per_group

    @property
    def num_hosts(self) -> int:
        """How many processes there would be, one on each host."""
        return -(-self.num_devices // self.accelerator.devices_per_host)

    @property
    def name(self) -> str:
        """As `parse_target` takes it."""
        if not self.shape:
            return f"{self.num_devices}x{self.accelerator.name}"
        slice_name = f"{self.accelerator.name}:{'x'.join(map(str, self.shape))}"
        return slice_name if self.num_groups == 1 else f"{self.num_groups}x{slice_name}"

    @property
    def num_hops(self) -> int:
        """From one device of a host or slice to all others, one after the other in rings."""
        if self.accelerator.platform == "gpu":
            return self.devices_per_group - 1
        shape = self.shape or (math.isqrt(self.devices_per_group - 1) + 1,) * 2
        return min(sum(size - 1 for size in shape), self.devices_per_group - 1)

    @property
    def topology(self) -> AbsentTopology:
        """What a strategy has there."""
        kind, per_host = self.accelerator, self.accelerator.devices_per_host
        devices: Any = tuple(
            AbsentDevice(
                id=index,
                platform=kind.platform,
                device_kind=kind.device_kind,
                process_index=index // per_host,
                slice_index=index // self.devices_per_group,
            )
            for index in range(self.num_devices)
        )
        return AbsentTopology(devices)

    def of_size(self, num_devices: int) -> Target:
        """Returns a smaller or larger machine of the same kind, to see how a step scales.

        Args:
            num_devices: within one group, or a multiple of one.

        Returns:
            The machine; what of a slice is only a part has no shape.
        """
        inside = min(num_devices, self.devices_per_group)
        shape = self.shape if inside == self.devices_per_group else ()
        return Target(self.accelerator, num_devices // inside, inside, shape)

    def sizes(self) -> list[int]:
        """Numbers of devices from 1 to all: powers of two, and then full groups."""
        inside = [1]
        while inside[-1] * 2 < self.devices_per_group:
            inside.append(inside[-1] * 2)
        groups = [1]
        while groups[-1] * 2 < self.num_groups:
            groups.append(groups[-1] * 2)
        numbers = {*inside, *(group * self.devices_per_group for group in groups)}
        return sorted(numbers | {self.num_devices})


def parse_target(text: str) -> Target:
    """Returns the machine that a name stands for.

    Args:
        text: a number of GPUs ("8xH100"), a slice of a TPU ("v5e:4x4") or several ("2xv5e:4x4").

    Returns:
        The machine.

    Raises:
        TypeError: no text.
        ValueError: an unknown accelerator, or GPUs that neither fit into one host nor fill several.

    Example:
        >>> from stratagem.planning import parse_target
        >>> [parse_target(text).num_devices for text in ("8xH100", "v5e:4x4", "2xv5e:4x4")]
        [8, 16, 32]
    """
    if not isinstance(text, str):
        raise TypeError(
            explain(
                f"target={text!r} is of type {type(text).__name__}.",
                expected='a name such as "8xH100".',
                fix="write the name of the machine as a string.",
            )
        )
    if found := _SLICES.fullmatch(text.strip()):
        return _slices(text, int(found[1] or 1), found[2], found[3])
    found = _GPUS.fullmatch(text.strip())
    kind = _kind(found[2]) if found else None
    if found is None or kind is None:
        raise _unknown(text)
    if kind.platform == "tpu":
        raise ValueError(
            explain(
                f"target={text!r} names a TPU without the shape of its slice.",
                expected=f'a shape, because it decides the links: "{kind.name}:4x4".',
                fix="write the shape behind a colon, as the TPU's topology is written.",
            )
        )
    return _hosts(text, int(found[1] or 1), kind)


def _kind(name: str) -> Accelerator | None:
    known = _NAMES.get(name.lower())
    return None if known is None else ACCELERATORS[known]


def _slices(text: str, num_slices: int, name: str, shape: str) -> Target:
    kind = _kind(name)
    if kind is None or kind.platform != "tpu":
        raise _unknown(text)
    sizes = tuple(map(int, shape.split("x")))
    if not num_slices or not all(sizes):
        raise _empty(text)
    return Target(kind, num_slices, math.prod(sizes), sizes)


def _hosts(text: str, num_gpus: int, kind: Accelerator) -> Target:
    if not num_gpus:
        raise _empty(text)
    per_host = kind.devices_per_host
    if num_gpus > per_host and num_gpus % per_host:
        raise ValueError(
            explain(
                f"target={text!r} names {num_gpus} GPUs in hosts of {per_host}.",
                expected=f"at most {per_host}, or full hosts.",
                fix=f"ask for {num_gpus - num_gpus % per_host} or "
                f"{num_gpus + per_host - num_gpus % per_host}.",
            )
        )
    inside = min(num_gpus, per_host)
    return Target(kind, num_gpus // inside, inside)


def _empty(text: str) -> ValueError:
    return ValueError(
        explain(
            f"target={text!r} names no device.",
            expected="at least one.",
            fix='write a number above 0, such as "8xH100".',
        )
    )


def _unknown(text: str) -> ValueError:
    gpus = ", ".join(name for name, kind in ACCELERATORS.items() if kind.platform == "gpu")
    tpus = ", ".join(name for name, kind in ACCELERATORS.items() if kind.platform == "tpu")
    return ValueError(
        explain(
            f"target={text!r} is not known.",
            expected=f'a number of GPUs such as "8xH100" ({gpus}), or a slice of a TPU such as '
            f'"v5e:4x4", or several, "2xv5e:4x4" ({tpus}).',
            fix="name one of these.",
        )
    )

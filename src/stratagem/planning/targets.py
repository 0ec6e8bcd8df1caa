"""Planning targets by name: "8xH100", "v5e:4x4", "2xv5e:4x4"."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from stratagem.devices.finding import AbstractDevice, AbstractTopology
from stratagem.errors import explain
from stratagem.planning.accelerators import ACCELERATORS, Accelerator

_GPUS = re.compile(r"(?:(\d+)x)?([a-z]\w*)", re.IGNORECASE)
_SLICES = re.compile(r"(?:(\d+)x)?(v\d\w*):(\d+(?:x\d+)*)", re.IGNORECASE)
_NAMES = {name.lower(): name for name in ACCELERATORS}


@dataclasses.dataclass(frozen=True)
class Target:
    """A number of devices of one kind.

    Args:
        accelerator: kind of the devices.
        num_groups: number of GPU hosts, or of TPU slices.
        devices_per_group: number of devices per host or slice, connected by fast links.
        shape: shape of a slice; empty for GPUs.

    Example:
        >>> target = sg.planning.Target(
        ...     sg.planning.ACCELERATORS["H100"], num_groups=2, devices_per_group=8)
        >>> target.name, target.num_hosts, target.sizes()
        ('16xH100', 2, [1, 2, 4, 8, 16])

    Source: specific to Stratagem.
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

    Example:
        >>> from stratagem.planning import parse_target
        >>> [parse_target(text).num_devices for text in ("8xH100", "v5e:4x4", "2xv5e:4x4")]
        [8, 16, 32]

    Source: specific to Stratagem.
    """
    if not isinstance(text, str):
        raise TypeError(
            explain(
                f"target={text!r} is of type {type(text).__name__}.",
                expected='a name such as "8xH100".',
                fix="pass the name of the machine as a string.",
            )
        )
    if found := _SLICES.fullmatch(text.strip()):
        return _parse_slices(text, int(found[1] or 1), found[2], found[3])
    found = _GPUS.fullmatch(text.strip())
    kind = _find_accelerator(found[2]) if found else None
    if found is None or kind is None:
        raise _unknown_target_error(text)
    if kind.platform == "tpu":
        raise ValueError(
            explain(
                f"target={text!r} names a TPU without the shape of its slice.",
                expected=f'a shape, since the links depend on it: "{kind.name}:4x4".',
                fix="append a colon and the TPU topology.",
            )
        )
    return _parse_hosts(text, int(found[1] or 1), kind)


def _find_accelerator(name: str) -> Accelerator | None:
    known = _NAMES.get(name.lower())
    return None if known is None else ACCELERATORS[known]


def _parse_slices(text: str, num_slices: int, name: str, shape: str) -> Target:
    kind = _find_accelerator(name)
    if kind is None or kind.platform != "tpu":
        raise _unknown_target_error(text)
    sizes = tuple(map(int, shape.split("x")))
    if not num_slices or not all(sizes):
        raise _no_devices_error(text)
    return Target(kind, num_slices, math.prod(sizes), sizes)


def _parse_hosts(text: str, num_gpus: int, kind: Accelerator) -> Target:
    if not num_gpus:
        raise _no_devices_error(text)
    per_host = kind.devices_per_host
    if num_gpus > per_host and num_gpus % per_host:
        raise ValueError(
            explain(
                f"target={text!r}: {num_gpus} GPUs do not fill hosts of {per_host}.",
                expected=f"at most {per_host} GPUs, or a multiple of {per_host}.",
                fix=f"use {num_gpus - num_gpus % per_host} or "
                f"{num_gpus + per_host - num_gpus % per_host}.",
            )
        )
    inside = min(num_gpus, per_host)
    return Target(kind, num_gpus // inside, inside)


def _no_devices_error(text: str) -> ValueError:
    return ValueError(
        explain(
            f"target={text!r} has no devices.",
            expected="at least one.",
            fix='use a number above 0, such as "8xH100".',
        )
    )


def _unknown_target_error(text: str) -> ValueError:
    gpus = ", ".join(name for name, kind in ACCELERATORS.items() if kind.platform == "gpu")
    tpus = ", ".join(name for name, kind in ACCELERATORS.items() if kind.platform == "tpu")
    return ValueError(
        explain(
            f"target={text!r} is not a known machine.",
            expected=f'a number of GPUs such as "8xH100" ({gpus}), a TPU slice such as "v5e:4x4", '
            f'or several such as "2xv5e:4x4" ({tpus}).',
            fix="use a listed accelerator.",
        )
    )

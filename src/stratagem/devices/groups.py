"""Groups of devices: a replica computes on all devices of its group, its logical devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import jax

from stratagem.messages import explain


def check_groups(
    groups: Sequence[Sequence[jax.Device]],
) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns device groups as tuples, one per replica.

    A group may have all devices of several processes. Raises ValueError for missing, empty or
    unequal groups, a repeated device, or a group with some devices of several processes.
    """
    sizes = [len(group) for group in groups]
    if not sizes or not all(sizes) or len(set(sizes)) > 1:
        raise ValueError(
            explain(
                f"The device groups have {', '.join(map(str, sizes)) or 'no'} devices.",
                expected="the same number of devices for each replica, at least one.",
                fix="give each replica the same number of devices.",
                code="SG104",
            )
        )
    counts = Counter(device for group in groups for device in group)
    repeated = sorted(str(device) for device, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(
            explain(
                f"The device groups contain {', '.join(repeated)} more than once.",
                expected="each device at most once: a device belongs to one replica.",
                fix="remove the duplicates.",
            )
        )
    _check_processes(groups)
    return tuple(tuple(group) for group in groups)


def _check_processes(groups: Sequence[Sequence[jax.Device]]) -> None:
    """Raises ValueError for a group that shares one of its several processes with another."""
    processes = [{device.process_index for device in group} for group in groups]
    num_groups = Counter(process for group in processes for process in group)
    for group, own in zip(groups, processes, strict=True):
        if len(own) > 1 and any(num_groups[process] > 1 for process in own):
            raise ValueError(
                explain(
                    f"The group {', '.join(map(str, group))} has a part of the devices of several "
                    "processes.",
                    expected="groups within one process, or of all devices of several processes.",
                    fix="use groups that divide the devices of one process, or that are a multiple "
                    "of them.",
                    code="SG104",
                )
            )


def adjacent_groups(
    devices: Sequence[jax.Device], devices_per_replica: int
) -> tuple[tuple[jax.Device, ...], ...]:
    """Divides devices, ordered by process, into groups of adjacent ones.

    A group is within a process, or has all devices of several. Raises ValueError if the devices
    cannot be divided evenly in this way.
    """
    if not isinstance(devices_per_replica, int) or isinstance(devices_per_replica, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            explain(
                f"devices_per_replica={devices_per_replica!r} is of type "
                f"{type(devices_per_replica).__name__}.",
                expected="an int, 1 for one replica per device.",
                fix="pass for example devices_per_replica=2.",
            )
        )
    counts = Counter(device.process_index for device in devices)
    if devices_per_replica < 1 or not _fit(devices_per_replica, len(devices), counts.values()):
        several = (
            f", or a multiple of it that divides the {len(devices)} devices of all processes"
            if len(counts) > 1
            else ""
        )
        raise ValueError(
            explain(
                f"devices_per_replica={devices_per_replica} does not divide the "
                f"{min(counts.values())} devices of each process.",
                expected=f"a divisor of that number, at least 1{several}.",
                fix="use a divisor, or change the visible devices (CUDA_VISIBLE_DEVICES).",
                code="SG104",
            )
        )
    starts = range(0, len(devices), devices_per_replica)
    return check_groups([devices[start : start + devices_per_replica] for start in starts])


def _fit(size: int, num_devices: int, counts: Collection[int]) -> bool:
    """Returns True if groups of a size divide each process, or have several whole processes."""
    if all(count % size == 0 for count in counts):
        return True
    return num_devices % size == 0 and len({*counts}) == 1 and size % min(counts) == 0


def prime_factors(number: int) -> tuple[int, ...]:
    """Returns the prime factors of a positive number in ascending order."""
    factors: list[int] = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)

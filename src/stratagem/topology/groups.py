"""Groups of devices: a replica computes on all devices of its group, its logical devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from stratagem.messages import explain

__all__ = ["adjacent_groups", "check_groups", "prime_factors"]


def check_groups(
    groups: Sequence[Sequence[jax.Device]],
) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns device groups as tuples, one per replica.

    Raises ValueError for missing, empty or unequal groups, a repeated device, or a group that spans
    processes.
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
    for group in groups:
        if len({device.process_index for device in group}) > 1:
            raise ValueError(
                explain(
                    f"The group {', '.join(map(str, group))} spans several processes.",
                    expected="groups within one process.",
                    fix="use groups that divide the devices of one process.",
                    code="SG104",
                )
            )
    return tuple(tuple(group) for group in groups)


def adjacent_groups(
    devices: Sequence[jax.Device], devices_per_replica: int
) -> tuple[tuple[jax.Device, ...], ...]:
    """Divides devices, ordered by process, into groups of adjacent ones, each within a process.

    Raises ValueError if the devices of a process cannot be divided evenly.
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
    if devices_per_replica < 1 or any(n % devices_per_replica for n in counts.values()):
        raise ValueError(
            explain(
                f"devices_per_replica={devices_per_replica} does not divide the "
                f"{min(counts.values())} devices of each process.",
                expected="a divisor of that number, at least 1.",
                fix="use a divisor, or change the visible devices (CUDA_VISIBLE_DEVICES).",
                code="SG104",
            )
        )
    starts = range(0, len(devices), devices_per_replica)
    return check_groups([devices[start : start + devices_per_replica] for start in starts])


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

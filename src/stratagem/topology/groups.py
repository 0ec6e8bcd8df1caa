"""Groups of devices: a replica computes on all devices of its group, its logical devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import jax

from stratagem.messages import explain

__all__ = ["check_groups", "neighbours", "prime_factors"]


def check_groups(
    groups: Sequence[Sequence[jax.Device]],
) -> tuple[tuple[jax.Device, ...], ...]:
    """Returns groups of devices as tuples.

    Args:
        groups: the devices of each replica.

    Raises:
        ValueError: no group, an empty one, groups of unequal size, a repeated device, or one group
            with devices of several processes.
    """
    sizes = [len(group) for group in groups]
    if not sizes or not all(sizes) or len(set(sizes)) > 1:
        raise ValueError(
            explain(
                f"The groups of devices have {', '.join(map(str, sizes)) or 'no'} devices.",
                expected="as many devices for each replica, at least one.",
                fix="give each replica the same number of devices.",
            )
        )
    counts = Counter(device for group in groups for device in group)
    repeated = sorted(str(device) for device, count in counts.items() if count > 1)
    if repeated:
        raise ValueError(
            explain(
                f"The groups of devices name {', '.join(repeated)} more than once.",
                expected="each device at most once: a device belongs to one replica.",
                fix="remove the repetition.",
            )
        )
    for group in groups:
        if len({device.process_index for device in group}) > 1:
            raise ValueError(
                explain(
                    f"The group {', '.join(map(str, group))} has devices of several processes.",
                    expected="groups within a process, which holds a part of the data for each.",
                    fix="choose groups that divide the devices of one process.",
                )
            )
    return tuple(tuple(group) for group in groups)


def neighbours(
    devices: Sequence[jax.Device], devices_per_replica: int
) -> tuple[tuple[jax.Device, ...], ...]:
    """Divides devices into groups of neighbours, each within a process.

    Args:
        devices: those of each process one after the other.
        devices_per_replica: size of a group.

    Returns:
        The groups, in the order of the devices.

    Raises:
        ValueError: the devices of a process cannot be divided so.
        TypeError: a number of another type.
    """
    if not isinstance(devices_per_replica, int) or isinstance(devices_per_replica, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            explain(
                f"devices_per_replica={devices_per_replica!r} is of type "
                f"{type(devices_per_replica).__name__}.",
                expected="an int, 1 for a replica on each device.",
                fix="pass for example devices_per_replica=2.",
            )
        )
    counts = Counter(device.process_index for device in devices)
    if devices_per_replica < 1 or any(n % devices_per_replica for n in counts.values()):
        raise ValueError(
            explain(
                f"devices_per_replica={devices_per_replica} with "
                f"{min(counts.values())} devices in each process.",
                expected="a number that divides them, at least 1.",
                fix="choose one, or make other devices visible (CUDA_VISIBLE_DEVICES).",
            )
        )
    starts = range(0, len(devices), devices_per_replica)
    return check_groups([devices[start : start + devices_per_replica] for start in starts])


def prime_factors(number: int) -> tuple[int, ...]:
    """Returns the prime factors of a number in ascending order.

    Args:
        number: at least 1.

    Example:
        >>> prime_factors(12)
        (2, 2, 3)
    """
    factors: list[int] = []
    factor = 2
    while number > 1:
        while number % factor == 0:
            factors.append(factor)
            number //= factor
        factor += 1
    return tuple(factors)

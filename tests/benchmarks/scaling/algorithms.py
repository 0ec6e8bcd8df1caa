"""All-reduces carried out step by step on arrays, counting what each member sends."""

from __future__ import annotations

import dataclasses

import numpy as np

__all__ = ["Traffic", "hierarchical", "ring"]


@dataclasses.dataclass
class Traffic:
    """What one member sends: messages one after the other, and elements in all of them."""

    num_messages: int = 0
    num_elements: int = 0


def ring(arrays: list[np.ndarray], traffic: Traffic) -> list[np.ndarray]:
    """A reduce-scatter and an all-gather, each neighbour to neighbour."""
    count = len(arrays)
    parts = [np.array_split(array.copy(), count) for array in arrays]
    for step in range(2 * (count - 1)):
        sent = [parts[member][(member - step) % count].copy() for member in range(count)]
        for member in range(count):
            place = (member - step) % count
            receiver = parts[(member + 1) % count]
            receiver[place] = sent[member] + (receiver[place] if step < count - 1 else 0)
        if count > 1:
            traffic.num_messages += 1
            traffic.num_elements += len(sent[0])
    return [np.concatenate(own) for own in parts]


def hierarchical(
    arrays: list[np.ndarray], per_host: int, inside: Traffic, between: Traffic
) -> list[np.ndarray]:
    """Scattered inside each host, summed between hosts part by part, gathered inside each host.

    Between hosts the vector is halved and doubled; the number of hosts is a power of two.
    """
    hosts = [arrays[start : start + per_host] for start in range(0, len(arrays), per_host)]
    parts = [[np.array_split(array, per_host) for array in host] for host in hosts]
    # What each member of each host holds after the reduce-scatter in its host.
    own = [[sum(member[part] for member in host) for part in range(per_host)] for host in parts]
    for part in range(per_host):
        counted = between if part == 0 else Traffic()
        summed = _halving_and_doubling([host[part] for host in own], counted)
        for host, array in zip(own, summed, strict=True):
            host[part] = array
    inside.num_messages += 2 * (per_host - 1)
    inside.num_elements += 2 * (per_host - 1) * len(own[0][0])
    return [np.concatenate(host) for host in own for _ in range(per_host)]


def _halving_and_doubling(arrays: list[np.ndarray], traffic: Traffic) -> list[np.ndarray]:
    """Recursive halving and doubling: partners exchange halves of what is left, and back."""
    arrays = [array.copy() for array in arrays]
    count, ranges = len(arrays), [(0, len(arrays[0]))] * len(arrays)
    distance = count // 2
    while distance:
        received = {}
        kept = list(ranges)
        for member in range(count):
            start, end = ranges[member]
            middle = (start + end) // 2
            is_low = not member & distance
            kept[member] = (start, middle) if is_low else (middle, end)
            low, high = kept[member]
            received[member] = arrays[member ^ distance][low:high].copy()
        for member, array in received.items():
            low, high = kept[member]
            arrays[member][low:high] += array
        traffic.num_messages += 1
        traffic.num_elements += len(received[0])
        ranges, distance = kept, distance // 2
    distance = 1
    while distance < count:
        before = [array.copy() for array in arrays]
        for member in range(count):
            start, end = ranges[member ^ distance]
            arrays[member][start:end] = before[member ^ distance][start:end]
        traffic.num_messages += 1
        traffic.num_elements += ranges[0][1] - ranges[0][0]
        ranges = [
            (min(ranges[m][0], ranges[m ^ distance][0]), max(ranges[m][1], ranges[m ^ distance][1]))
            for m in range(count)
        ]
        distance *= 2
    return arrays

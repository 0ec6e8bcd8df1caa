"""Islands of a topology: the replicas that train in lockstep, from the user's argument."""

from __future__ import annotations

import collections

from stratagem.devices.collectives.islands import Islands
from stratagem.devices.mesh import Topology
from stratagem.messages import explain


def islands_of(topology: Topology, replicas_per_island: object) -> Islands:
    """Returns the islands of a topology.

    Args:
        topology: the devices of the replicas, those of a process one after the other.
        replicas_per_island: number of replicas of an island, or "process" for those of a process.

    Raises:
        TypeError: an argument of another type.
        ValueError: islands of unequal size; an island that has a part of a process besides others;
            replicas of several devices.
    """
    count = topology.num_replicas
    of_processes = _replicas_of_processes(topology)
    size = replicas_per_island
    if size == "process":
        sizes = set(of_processes)
        if len(sizes) > 1:
            raise ValueError(
                explain(
                    f'replicas_per_island="process" with processes of {of_processes} replicas.',
                    expected="the same number of replicas on each process: islands are averaged "
                    "with equal weights.",
                    fix="give each process as many devices, or pass replicas_per_island=1.",
                )
            )
        size = of_processes[0]
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(_unexpected(size, count, f"is of type {type(size).__name__}"))
    if size < 1 or count % size:
        raise ValueError(_unexpected(size, count, f"does not divide {count} replicas"))
    if any(size % own and own % size for own in of_processes):
        raise ValueError(
            explain(
                f"replicas_per_island={size} with processes of {of_processes} replicas.",
                expected="islands of whole processes, or processes of whole islands: lockstep is "
                "for the fast links.",
                fix='pass "process", or a divisor or multiple of the replicas of a process.',
            )
        )
    if 1 < size < count and topology.groups is not None:
        raise ValueError(
            explain(
                f"replicas_per_island={size} with replicas of several devices.",
                expected="replicas of one device each.",
                fix="pass a flat list of devices, or replicas_per_island=1.",
            )
        )
    return Islands(count, size)


def _replicas_of_processes(topology: Topology) -> list[int]:
    if topology.devices is None:
        return [topology.num_replicas]
    counts = collections.Counter(device.process_index for device in topology.devices)
    return list(counts.values())


def _unexpected(size: object, count: int, what: str) -> str:
    return explain(
        f"replicas_per_island={size!r} {what}.",
        expected=f'a divisor of the {count} replicas, or "process".',
        fix='pass "process" to train in lockstep on the devices of each machine.',
    )

"""Collectives over replicas: how a strategy combines values, and exchange of objects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.devices.all_reduce import (
    NO_PACKING,
    WITHIN_PROCESS,
    GradientPacking,
    NumberedPacks,
)
from stratagem.group import current as host
from stratagem.logs import size_text

if TYPE_CHECKING:
    from stratagem.execution.communicator import MeshCommunicator
    from stratagem.strategies.strategy import Strategy

__all__ = ["explain", "host"]


def explain(strategy: Strategy) -> None:
    """Prints how a strategy combines values over its replicas.

    Args:
        strategy: a strategy.

    Example:
        >>> sg.collectives.explain(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
        2 replicas on 1 process, cpu
        algorithm: compiler
        gradients: packed together up to 64.0 KiB each, if at most 16

    Source: specific to Stratagem.
    """
    ops, topology = strategy.cross_device_ops, strategy.topology
    communicator = ops.communicator(topology)
    num_processes = len({process for own in topology.processes_of_inputs for process in own})
    replicas = _count_text(topology.num_replicas, "replica")
    lines = [f"{replicas} on {_count_text(num_processes, 'process')}, {topology.platform}"]
    if communicator.combine is not None:
        lines.append("algorithm: custom function of the values of all replicas")
    else:
        lines.append(f"algorithm: {_rule_text(communicator)}")
        lines.append(f"gradients: {_packing_text(communicator.packing)}")
    if communicator.in_bfloat16:
        lines.append("float32 gradients: sent as bfloat16, by a separate algorithm")
    if ops.compression is not None:
        lines.append(f"gradients of matrices: as {ops.compression}")
    if strategy.local_updates is not None:
        lines.append(f"weights synchronized every {strategy.local_updates.least_period} steps")
    print("\n".join(lines))


def _rule_text(communicator: MeshCommunicator) -> str:
    # The limits of the rule are powers of two, and none is above 1 GiB.
    sizes = [2**power for power in range(31)]
    found = [communicator.algorithm_of(size) for size in sizes]
    parts = [
        f"{own.value} up to {size_text(size, least=1)}"
        for size, own, other in zip(sizes, found, found[1:], strict=False)
        if own is not other
    ]
    return ", ".join([*parts, found[-1].value + (" above" if parts else "")])


def _packing_text(packing: GradientPacking) -> str:
    if packing == NO_PACKING:
        return "not packed, but the compiler may combine them"
    if isinstance(packing, NumberedPacks):
        return f"in {_count_text(packing.num_packs, 'pack')}"
    if packing == WITHIN_PROCESS:
        size = size_text(packing.max_array_bytes, least=1)
        return f"packed together up to {size} each, if at most {packing.max_num_arrays}"
    return f"in packs of {size_text(packing.pack_bytes, least=1)}"


def _count_text(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}" + ("" if number == 1 else plural)

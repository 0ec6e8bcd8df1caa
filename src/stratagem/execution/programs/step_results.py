"""Results of a step: arrays in the structure that the replica function returned."""

from __future__ import annotations

from typing import Any

import jax

from stratagem.devices.abstract_devices import placeholder
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import local_copy
from stratagem.execution.tracing.trace import Trace
from stratagem.variables.distributed import PerReplica


def assemble_results(trace: Trace, outputs: list[Any], topology: Topology) -> Any:
    """Returns the result of a replica function, plain with one replica."""
    several = topology.num_replicas > 1
    leaves: list[Any] = []
    for (is_array, value), lengths in zip(trace.results, trace.result_lengths, strict=True):
        if not is_array:
            leaves.append(value)
        elif several:
            leaves.append(PerReplica(stacked=outputs[value], lengths=lengths))
        else:
            output = local_copy(outputs[value], topology)
            leaves.append(output if lengths is None else output[: lengths[0]])
    return jax.tree.unflatten(trace.result_structure, leaves)


def placeholder_results(trace: Trace, topology: Topology) -> list[Any]:
    """Returns placeholder outputs for abstract devices; no variable changes."""
    several = topology.num_replicas > 1
    return [
        placeholder((topology.num_replicas, *aval.shape[1:]) if several else aval.shape, aval.dtype)
        for aval in trace.jaxpr.out_avals[len(trace.written) :]
    ]

"""Ours: sums of arrays over replicas by each algorithm, as one of the processes of a cluster."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import stratagem as sg  # isort: skip - before jax, because it readies the collectives

import jax
import numpy as np
from jax.sharding import PartitionSpec

from benchmarks.workers.protocol import arguments, serve_questions
from stratagem.devices.all_reduce import Algorithm, ReplicaAxis
from stratagem.devices.lockstep import compiling, run_together, wait_until_ready
from stratagem.devices.mesh import Topology
from stratagem.devices.shared_sums import is_connected, no_sums, ordered_sum
from stratagem.execution.communicator import MeshCommunicator

# Bytes per round, within limits of the number of sums: long enough to stand out from noise.
_ROUND_BYTES, _MIN_SUMS, _MAX_SUMS = 2**22, 2, 20
# Above this size, copying the array takes longer than sending it.
_COPIED_BYTES = 2**18


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Answers how long a sum takes by each algorithm, and which of them AUTO chooses."""
    strategy = sg.MultiWorkerMirroredStrategy()
    topology = strategy.topology
    communicator = strategy.cross_device_ops.communicator(topology)

    wanted = arguments().get("algorithm")

    @functools.lru_cache(maxsize=1)  # those of one size take enough memory
    def sums_of(size: int) -> dict[str, _Sums]:
        algorithms = [one for one in _algorithms_of(topology) if wanted in (None, one.value)]
        return {one.value: _Sums(topology, one, size) for one in algorithms}

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        size = question["bytes"]
        sums = sums_of(size)
        # Interleaved, so that other load on the machine affects all algorithms.
        rounds = [[one.time_s() for one in sums.values()] for _ in range(question["rounds"])]
        medians = map(statistics.median, zip(*rounds, strict=True))
        return {
            "seconds": dict(zip(sums, medians, strict=True)),
            "chosen": wanted or communicator.algorithm_of(size).value,
        }

    return answer


def _algorithms_of(topology: Topology) -> list[Algorithm]:
    axis = ReplicaAxis.of(topology)
    return [
        one
        for one in Algorithm
        if (axis.groups or one is not Algorithm.HIERARCHICAL)
        and (axis.size > 2 or one is not Algorithm.TWO_STAGE)  # of two, a ring is the same
        and (is_connected(topology) or one is not Algorithm.SHARED_MEMORY)
    ]


class _Sums:
    """A compiled program that sums an array several times with one algorithm."""

    def __init__(self, topology: Topology, algorithm: Algorithm, size_bytes: int) -> None:
        self._name = f"{algorithm.value} all-reduce of {size_bytes} bytes"
        self._num_sums = min(max(_ROUND_BYTES // size_bytes, _MIN_SUMS), _MAX_SUMS)
        self._platform = topology.platform
        axis = ReplicaAxis.of(topology)
        communicator = MeshCommunicator(axis, algorithm)

        def add(carry: Any, _: None) -> tuple[Any, None]:
            part, order = carry
            if algorithm is Algorithm.SHARED_MEMORY:
                return ordered_sum(part, order, axis.name), None
            return (communicator.all_reduce(sg.ReduceOp.SUM, part), order), None

        def body(part: jax.Array) -> jax.Array:
            # Not unrolled, the result is copied to the input of the next sum.
            unroll = 2 if size_bytes >= _COPIED_BYTES else 1
            start = (part[0], no_sums())
            (total, _), _ = jax.lax.scan(add, start, None, length=self._num_sums, unroll=unroll)
            return total[None]

        spec = PartitionSpec(axis.name)
        mapped = jax.shard_map(
            body, mesh=topology.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        zeros = np.zeros((topology.num_local_replicas, size_bytes // 4), np.float32)
        self._array = topology.put_stacked(zeros)
        # Donated, since allocating each result costs as much as a sum of a large array.
        with compiling(self._name):
            self._program = jax.jit(mapped, donate_argnums=0).lower(self._array).compile()
        self.time_s()

    def time_s(self) -> float:
        """Measures the seconds of one sum."""

        def start() -> tuple[Any, Any]:
            result = self._program(self._array)
            return result, result

        started_s = time.perf_counter()
        self._array = run_together(self._name, start, platform=self._platform)
        wait_until_ready(self._array)
        return (time.perf_counter() - started_s) / self._num_sums


if __name__ == "__main__":
    serve_questions(prepare)

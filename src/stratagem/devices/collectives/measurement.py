"""Measurement of all-reduce algorithms, once per set of machines, cached for later runs.

Between processes on CPU the cost of each algorithm depends on machine and network. On accelerators,
and within one process, the compiler's algorithm is used, since it tunes itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from stratagem.devices.collectives.all_reduce import ChosenAllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.choice import Algorithm, Choice, choose
from stratagem.devices.collectives.shared_sums import (
    connect_memory,
    is_connected,
    no_sums,
    ordered_sum,
)
from stratagem.devices.lockstep import compiling, run_together, wait_until_ready
from stratagem.devices.mesh import Topology
from stratagem.group.current import current_group
from stratagem.options import ReduceOp

SIZES_BYTES = tuple(2**power for power in (12, 15, 18, 21, 24))
# Time per size on the slowest process, which limits the rounds: startup waits for all of them, and
# large arrays vary less.
_SIZE_S, _MIN_ROUNDS, _MAX_ROUNDS = 0.8, 3, 15
# Bytes per round, within limits of the number of sums: long enough to stand out from noise.
_ROUND_BYTES = 2**22
_MIN_SUMS, _MAX_SUMS = 2, 20
# Over a slow link, a sum or a round of them is much longer than the noise: measured fewer times.
_LONG_SUM_S, _LONG_ROUND_S = 0.02, 2.0
# Above this size, copying the array takes longer than sending it.
_COPIED_BYTES = 2**18


@dataclasses.dataclass(frozen=True)
class MeasuredChoice:
    """A choice and the measurements that it is based on.

    Args:
        choice: the rule.
        times_s: seconds by algorithm and array size in bytes.
        source: origin of the times, as part of a sentence.

    Example:
        >>> ring, compiler = sg.collectives.Algorithm.RING, sg.collectives.Algorithm.COMPILER
        >>> times_s = {compiler: {4096: 1e-4}, ring: {4096: 5e-5}}
        >>> measured = sg.collectives.MeasuredChoice(
        ...     sg.collectives.Choice(ring), times_s, "measured at the start of this run")
        >>> measured.choice.algorithm(4096).value
        'ring'

    Source: specific to Stratagem.
    """

    choice: Choice
    times_s: Mapping[Algorithm, Mapping[int, float]]
    source: str

    @property
    def fastest_s(self) -> dict[int, float]:
        """Seconds of the chosen algorithm's sum by array size in bytes."""
        sizes = next(iter(self.times_s.values()), {})
        return {size: self.times_s[self.choice.algorithm(size)][size] for size in sizes}


def measured_choice(topology: Topology, cache_folder: Path) -> MeasuredChoice | None:
    """Returns the choice for a cluster; all processes must call it, and receive the same.

    Process 0 caches the times, so that every run on the same machines computes in the same order.

    Args:
        topology: devices of all processes.
        cache_folder: cache folder on process 0.

    Returns:
        The choice, or None if nothing is measured.

    Example:
        >>> from pathlib import Path
        >>> topology = sg.MirroredStrategy(["cpu:0", "cpu:1"]).topology
        >>> sg.collectives.measured_choice(topology, Path("measured")) is None  # one process
        True

    Source: specific to Stratagem.
    """
    group = current_group()
    if group is None or not topology.spans_processes or topology.platform != "cpu":
        return None
    connect_memory(topology)
    machines = group.exchange("the machines of the cluster", _describe_machine(topology))
    file = cache_folder / f"all_reduce_{_digest(machines)}.json"
    is_first = group.process_id == 0
    [cached, *_] = group.exchange("measured times", _read_cache(file) if is_first else None)
    if cached is not None:
        return MeasuredChoice(
            choose(_parse_times(cached)), _parse_times(cached), "cached by process 0"
        )
    own = measure_times(topology, SIZES_BYTES)
    reported = group.exchange("times of this process", _as_json(own))
    group.return_to_step(0)  # the user's program counts its steps from 1
    slowest = {
        algorithm: {
            size: max(_parse_times(theirs)[algorithm][size] for theirs in reported)
            for size in SIZES_BYTES
        }
        for algorithm in own
    }
    if is_first:
        _write_cache(file, _as_json(slowest))
    return MeasuredChoice(choose(slowest), slowest, "measured at the start of this run")


def measure_times(
    topology: Topology, sizes_bytes: tuple[int, ...], *, num_rounds: int | None = None
) -> dict[Algorithm, dict[int, float]]:
    """Measures all algorithms; call it on every process.

    Returns seconds per sum by algorithm and array size. `num_rounds` is the number of samples for
    the median; None for as many as a size needs.
    """
    axis = ReplicaAxis.of(topology)
    algorithms = [
        algorithm
        for algorithm in Algorithm
        if (axis.groups or algorithm is not Algorithm.HIERARCHICAL)
        and (axis.size > 2 or algorithm is not Algorithm.TWO_STAGE)  # of two, a ring is the same
        and (is_connected(topology) or algorithm is not Algorithm.SHARED_MEMORY)
    ]
    times_s: dict[Algorithm, dict[int, float]] = {algorithm: {} for algorithm in algorithms}
    probe = _SumBenchmark(topology, axis, Algorithm.COMPILER, sizes_bytes[0], _MIN_SUMS)
    sum_s = _slowest("a first sum", probe.time_s())
    for size in sizes_bytes:
        num_sums = _num_sums(size, sum_s)
        sums = [
            _SumBenchmark(topology, axis, algorithm, size, num_sums) for algorithm in algorithms
        ]
        round_s = _slowest(f"a round of {size} bytes", sum(one.first_round_s for one in sums))
        count = num_rounds or _num_rounds(round_s)
        sum_s = round_s / len(sums) / num_sums
        # Interleaved, so that other load on the machine affects all algorithms.
        rounds = [[one.time_s() for one in sums] for _ in range(count)]
        for algorithm, own_rounds in zip(algorithms, zip(*rounds, strict=True), strict=True):
            times_s[algorithm][size] = statistics.median(own_rounds)
    return times_s


def _slowest(name: str, own_s: float) -> float:
    """Returns the longest time of all processes, on each of them."""
    group = current_group()
    return own_s if group is None else max(group.exchange(name, own_s))


def _num_sums(size_bytes: int, sum_s: float) -> int:
    """Returns the sums of a round, where one of at most this size takes `sum_s`."""
    if sum_s > _LONG_SUM_S:
        return 1
    return min(max(_ROUND_BYTES // size_bytes, _MIN_SUMS), _MAX_SUMS)


def _num_rounds(round_s: float) -> int:
    """Returns the number of rounds after the first, which takes `round_s` on the slowest."""
    if round_s > _LONG_ROUND_S:
        return 1
    return min(max(int(_SIZE_S / round_s), _MIN_ROUNDS), _MAX_ROUNDS)


class _SumBenchmark:
    """A compiled program that sums an array several times with one algorithm."""

    def __init__(
        self,
        topology: Topology,
        axis: ReplicaAxis,
        algorithm: Algorithm,
        size_bytes: int,
        num_sums: int,
    ) -> None:
        self._topology = topology
        self._name = f"{algorithm.value} all-reduce of {size_bytes} bytes"
        self._num_sums = num_sums
        reduction = ChosenAllReduce(axis, Choice(algorithm))

        def add(carry: tuple[jax.Array, jax.Array], _: None) -> tuple[Any, None]:
            part, order = carry
            if algorithm is Algorithm.SHARED_MEMORY:
                return ordered_sum(part, order, axis.name), None
            return (reduction.one(ReduceOp.SUM, part), order), None

        def body(part: jax.Array) -> jax.Array:
            (total, _), _ = jax.lax.scan(
                add,
                (part[0], no_sums()),
                None,
                length=self._num_sums,
                # Otherwise the result is copied to the input of the next sum.
                unroll=2 if size_bytes >= _COPIED_BYTES else 1,
            )
            return total[None]

        spec = PartitionSpec(axis.name)
        mapped = jax.shard_map(
            body, mesh=topology.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
        zeros = np.zeros((topology.num_local_replicas, size_bytes // 4), np.float32)
        self._array = topology.put_stacked(zeros)
        # Donated, since allocating each result costs as much as a sum of a large array.
        self._program: Callable[..., jax.Array] = jax.jit(mapped, donate_argnums=0)
        if topology.spans_processes:
            with compiling(self._name):
                self._program = self._program.lower(self._array).compile()
        self.first_round_s = self.time_s() * self._num_sums

    def time_s(self) -> float:
        """Measures the seconds of one sum."""
        started_s = time.perf_counter()
        self._run()
        return (time.perf_counter() - started_s) / self._num_sums

    def _run(self) -> None:
        if not self._topology.spans_processes:
            self._array = jax.block_until_ready(self._program(self._array))
            return

        def start() -> tuple[jax.Array, jax.Array]:
            result = self._program(self._array)
            return result, result

        self._array = run_together(self._name, start, platform=self._topology.platform)
        wait_until_ready(self._array)


def _describe_machine(topology: Topology) -> list[Any]:
    return [
        platform.node(),
        platform.machine(),
        topology.num_local_replicas,
        jax.__version__,
        list(SIZES_BYTES),
        is_connected(topology),
    ]


def _digest(machines: list[Any]) -> str:
    return hashlib.sha256(json.dumps(machines).encode()).hexdigest()[:16]


def _as_json(times_s: Mapping[Algorithm, Mapping[int, float]]) -> dict[str, dict[str, float]]:
    return {
        algorithm.value: {str(size): time_s for size, time_s in times.items()}
        for algorithm, times in times_s.items()
    }


def _parse_times(times_s: Mapping[str, Mapping[str, float]]) -> dict[Algorithm, dict[int, float]]:
    return {
        Algorithm(algorithm): {int(size): float(time_s) for size, time_s in times.items()}
        for algorithm, times in times_s.items()
    }


def _read_cache(file: Path) -> Any:
    """Returns the cached times, or None if missing or invalid."""
    try:
        cached = json.loads(file.read_text(encoding="utf-8"))
        times_s = _parse_times(cached)
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    is_whole = Algorithm.COMPILER in times_s and all(
        set(times) == set(SIZES_BYTES) for times in times_s.values()
    )
    return cached if is_whole else None


def _write_cache(file: Path, times_s: Mapping[str, Mapping[str, float]]) -> None:
    """Caches times if possible; an unwritable folder only costs seconds."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{platform.node()}.tmp")
        unfinished.write_text(json.dumps(times_s, indent=1) + "\n", encoding="utf-8")
        unfinished.replace(file)
    except OSError:
        return

"""Times of sums between processes, ours and the peer's in turns."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.cases import Environments, Side
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerProcess
from benchmarks.workers.pinned_workers import cluster_variables
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["OUR_SIDE", "PEER", "Cluster", "Figures", "measure", "our_variables"]

PEER = "PyTorch Gloo"
OUR_SIDE = Side(
    name="ours",
    module="benchmarks.workers.stratagem_allreduce",
    options=WorkerOptions(workload=""),
    variables={"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
)
# One such sum takes longer than what disturbs it.
_LARGE_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes that sum.

    Args:
        num_processes: on this host.
        devices_per_process: of ours; PyTorch has one a process and is compared with one only.
    """

    num_processes: int
    devices_per_process: int = 1

    @property
    def num_replicas(self) -> int:
        return self.num_processes * self.devices_per_process

    def __str__(self) -> str:
        devices = f" x {self.devices_per_process} devices" if self.devices_per_process > 1 else ""
        return f"{self.num_processes} processes{devices}"


@dataclasses.dataclass(frozen=True)
class Figures:
    """What was measured of a size.

    Args:
        size_bytes: of the array of a replica.
        times_s: by algorithm, the peer among them: the medians of the rounds.
        chosen: what AUTO took.
        rounds: the times of each round.
    """

    size_bytes: int
    times_s: dict[str, float]
    chosen: str
    rounds: Sequence[dict[str, float]] = ()

    @property
    def loss_of_choice(self) -> float:
        """By how much what AUTO took is slower than the best of ours: 0.1 for ten percent."""
        own = {name: time_s for name, time_s in self.times_s.items() if name != PEER}
        return own[self.chosen] / min(own.values()) - 1.0

    @property
    def speed_over_peer(self) -> float | None:
        """AUTO's bandwidth over the peer's; None without one."""
        peer_s = self.times_s.get(PEER)
        return None if peer_s is None else peer_s / self.times_s[self.chosen]

    def bus_bandwidth(self, name: str, num_replicas: int) -> float:
        """Bytes a second that each replica has to send at least, as NCCL's tests count them."""
        return 2 * (num_replicas - 1) / num_replicas * self.size_bytes / self.times_s[name]


def measure(
    cluster: Cluster,
    sizes_bytes: Sequence[int],
    environments: Environments,
    effort: Effort,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[list[Figures], dict[str, dict[str, str]]]:
    """Measures all algorithms and, where it is installed, PyTorch.

    Args:
        cluster: the processes.
        sizes_bytes: of the arrays.
        environments: where the sides run.
        effort: how often, and how long to wait.
        progress: told what is going on.

    Returns:
        Figures for each size, and the versions by environment.

    Raises:
        WorkerError: a process ended, or did not answer in time.
    """
    peer = _peer_side()
    with contextlib.ExitStack() as stack:
        progress(f"{cluster}: starting")
        fleets = [
            _start(
                stack, OUR_SIDE, our_variables(cluster), [{}] * cluster.num_processes, environments
            )
        ]
        if cluster.devices_per_process == 1 and environments.why_not(peer) is None:
            ranks = _ranks(cluster.num_processes)
            fleets.append(_start(stack, peer, [{}] * len(ranks), ranks, environments))
        greetings = [_answers(fleet, effort.start_limit_s)[0] for fleet in fleets]
        figures: list[Figures] = []
        for size in sizes_bytes:
            rounds: list[dict[str, float]] = []
            chosen = ""
            is_large = size > _LARGE_BYTES
            num_rounds = min(effort.num_rounds, 3) if is_large else effort.num_rounds
            for number in range(num_rounds):
                progress(f"{cluster}: {size} bytes, round {number + 1}")
                seconds: dict[str, float] = {}
                for fleet in fleets:
                    for worker in fleet:
                        worker.tell({"bytes": size, "rounds": 1 if is_large else 3})
                    told = _answers(fleet, effort.answer_limit_s)
                    for name in told[0]["seconds"]:
                        seconds[name] = max(answer["seconds"][name] for answer in told)
                    chosen = told[0].get("chosen", chosen)
                rounds.append(seconds)
            times_s = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
            figures.append(Figures(size, times_s, chosen, rounds))
    names = ("ours", "peers")
    return figures, {
        name: greeting["versions"] for name, greeting in zip(names, greetings, strict=False)
    }


def _peer_side() -> Side:
    return Side(
        name=PEER,
        module="benchmarks.workers.torch_allreduce",
        options=WorkerOptions(workload=""),
        variables={"OMP_NUM_THREADS": "1"},
        environment="peers",
    )


def our_variables(cluster: Cluster) -> list[dict[str, str]]:
    """Returns the environment variables of each process of ours."""
    devices = {"JAX_NUM_CPU_DEVICES": str(cluster.devices_per_process)}
    return [{**one, **devices} for one in cluster_variables(cluster.num_processes)]


def _ranks(num_processes: int) -> list[dict[str, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    return [
        {"rank": rank, "num_processes": num_processes, "port": port}
        for rank in range(num_processes)
    ]


def _start(
    stack: contextlib.ExitStack,
    side: Side,
    variables: Sequence[Mapping[str, str]],
    arguments: Sequence[Mapping[str, Any]],
    environments: Environments,
) -> list[WorkerProcess]:
    program, flag, module, _ = environments.command(side)
    return [
        stack.enter_context(
            WorkerProcess(
                side.name,
                [program, flag, module, json.dumps(argument)],
                {**environments.variables(side), **own},
            )
        )
        for own, argument in zip(variables, arguments, strict=True)
    ]


def _answers(fleet: Sequence[WorkerProcess], limit_s: float) -> list[dict[str, Any]]:
    return [worker.read_answer(limit_s) for worker in fleet]

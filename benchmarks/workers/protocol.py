"""A worker's half of the conversation with the benchmark that started it.

The options come as JSON on the command line. The worker says it is ready; then each line on stdin
asks for something, and each answer tells how long it took. The end of stdin ends it.
This module is imported first and imports nothing but the standard library.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

# Only Linux lets a process choose its core, which has to be before any of its threads.
if "BENCHMARK_CORE" in os.environ:
    os.sched_setaffinity(0, {int(os.environ["BENCHMARK_CORE"])})

# Lines without it are noise, for example of a sitecustomize that ran before this module.
ANSWER_PREFIX = "benchmark-answer "

_DISTRIBUTIONS = (
    *("stratagem", "keras", "keras-nightly", "jax", "jaxlib", "orbax-checkpoint", "pyzmq", "numpy"),
    *("tensorflow", "torch", "torchrec", "fbgemm-gpu-cpu"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What a worker trains, and where."""

    workload: str  # key of `WORKLOADS` or `GPU_WORKLOADS` in `benchmarks.workloads`
    platform: str = "cpu"  # "cpu" or "gpu"
    num_devices: int = 1  # devices of that platform
    kind: str = ""  # of a worker that does one of several things
    steps_per_call: int = 1  # `steps_per_execution`
    data_on_device: bool = False  # whether the data lies on the device before the first step
    steps_per_epoch: int | None = None  # None for as many as the workload says
    step_s: float = 0.0  # how long a step takes that stands in for training
    batch_size: int | None = None  # of all devices together; None for as many as the workload says
    pinned: bool = False  # whether it is a worker of a cluster, on a core of its own
    compiled: bool = False  # whether PyTorch compiles the model
    is_tiny: bool = False  # a size for tests on a CPU
    # of a Llama: "causal", or "mask" for the mask that KerasHub passes to the kernel.
    attention: str = "causal"
    has_chunks: bool = False  # whether the loss of a Llama is computed by chunks of the vocabulary
    remat: str = ""  # policy of `sg.remat` for the blocks of a Llama; "" keeps all activations
    accumulation: int = 1  # batches of a Llama whose mean gradient makes an update
    optimizer_memory: str = "device"  # of a Llama's optimizer state: "device" or "pinned_host"

    @property
    def device_names(self) -> list[str]:
        return [f"{self.platform}:{index}" for index in range(self.num_devices)]


@dataclasses.dataclass(frozen=True)
class Training:
    """A prepared model."""

    # trains for so many epochs, waits for the devices and returns the last loss.
    run_epochs: Callable[[int], float]
    steps_per_epoch: int  # steps in each
    # told with each answer: "device_kind", "peak_bytes" of the device, "compile_s".
    details: Callable[[], dict[str, Any]] = dict
    # of two epochs, as JSON; None for sides that cannot.
    profile: Callable[[], dict[str, Any]] | None = None


def serve(prepare: Callable[[WorkerOptions], Training]) -> None:
    """Answers how long epochs take, until stdin ends."""

    def begin() -> Callable[[dict[str, Any]], dict[str, Any]]:
        training = prepare(WorkerOptions(**arguments()))

        def train(question: dict[str, Any]) -> dict[str, Any]:
            if "profile" in question:
                return {"profile": training.profile() if training.profile else None}
            start_s, start_cpu_s = time.perf_counter(), time.process_time()
            loss = training.run_epochs(question["epochs"])
            seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
            told = {"seconds": seconds, "cpu_s": cpu_s, "loss": float(loss)}
            steps = question["epochs"] * training.steps_per_epoch
            return {**told, "steps": steps, **training.details()}

        return train

    serve_questions(begin)


def serve_questions(prepare: Callable[[], Callable[[dict[str, Any]], dict[str, Any]]]) -> None:
    """Answers each line of stdin by what a function makes of it, with its seconds.

    Whatever goes wrong ends the process: stderr tells the rest.
    """
    # Libraries print to stdout whenever they like: it becomes stderr, answers have their own.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(message: dict[str, Any]) -> None:
        answers.write(ANSWER_PREFIX + json.dumps(message) + "\n")
        answers.flush()

    answer = prepare()
    tell({"versions": versions_here()})
    for line in sys.stdin:
        start_s = time.perf_counter()
        told = answer(json.loads(line))
        tell({"seconds": time.perf_counter() - start_s, **told})


def arguments() -> dict[str, Any]:
    return json.loads(sys.argv[1])


def versions_here() -> dict[str, str]:
    """Returns the versions of Python and of the libraries that are installed."""
    versions = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def cluster_variables(num_workers: int) -> list[dict[str, str]]:
    """Returns the `TF_CONFIG` of each worker of a cluster on this host."""
    cluster = {"worker": [f"127.0.0.1:{port}" for port in free_ports(num_workers)]}
    return [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}
        for index in range(num_workers)
    ]


def rank_variables(num_ranks: int) -> list[dict[str, str]]:
    """Returns the variables that PyTorch's launcher gives to each process."""
    (port,) = free_ports(1)
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(num_ranks)}
    return [{**common, "RANK": str(rank)} for rank in range(num_ranks)]


class StepLine(NamedTuple):
    """So many steps are done by a process, at a time by the machine's clock."""

    rank: int
    process_id: int
    step: int
    time_s: float


class StepTeller:
    """Writes a line for each step of a process, whole and at once."""

    def __init__(self, folder: Path, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"steps-{rank}", flags, 0o644)

    def tell(self, step: int) -> None:
        os.write(self._file, f"{os.getpid()} {step} {time.time():.6f}\n".encode())


def read_steps(folder: Path) -> list[StepLine]:
    """Returns the steps that were told so far, the earliest first."""
    found: list[StepLine] = []
    for path in folder.glob("steps-*"):
        rank = int(path.name.removeprefix("steps-"))
        for line in path.read_text(encoding="ascii").splitlines():
            process_id, step, time_s = line.split()
            found.append(StepLine(rank, int(process_id), int(step), float(time_s)))
    return sorted(found, key=lambda line: line.time_s)

"""Ours: several workers that answer as one, each a process on a core of its own.

This process starts them, with a cluster in `TF_CONFIG`, hands every question on to all, and takes
worker 0's word for what came out. They belong to its process group, and end with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.workers.protocol import ANSWER_PREFIX, Training, WorkerOptions, serve
from benchmarks.workloads import workload_of

__all__ = ["cluster_variables", "prepare", "start_pinned"]

_PROGRAM = "benchmarks.workers.stratagem_workers_fit"
_END_LIMIT_S = 8.0


def prepare(options: WorkerOptions) -> Training:
    """Starts the workers and waits until all are ready."""
    together = options.num_devices > 1 and not options.apart
    clusters = cluster_variables(options.num_devices) if together else [{}] * options.num_devices
    own = dataclasses.replace(options, num_devices=1)
    command = [sys.executable, "-m", _PROGRAM, json.dumps(dataclasses.asdict(own))]
    workers = start_pinned(command, clusters)
    greetings = [_read_answer(worker) for worker in workers]

    def run_epochs(num_epochs: int) -> float:
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"epochs": num_epochs}) + "\n")
            worker.stdin.flush()
        answers = [_read_answer(worker) for worker in workers]
        return answers[0]["loss"]

    steps_per_epoch = workload_of(options).steps_per_epoch
    return Training(run_epochs, steps_per_epoch, greetings[0]["device_kind"], lambda: _end(workers))


def start_pinned(
    command: Sequence[str], variables: Sequence[Mapping[str, str]]
) -> list[subprocess.Popen[str]]:
    """Starts a command once for each mapping of variables, each process on a core of its own.

    Args:
        command: program and arguments.
        variables: of the environment of each process, beside those of this one.

    Returns:
        The processes.

    Raises:
        RuntimeError: fewer cores than processes.
    """
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < len(variables):
        raise RuntimeError(
            f"{len(variables)} processes are to have a core each, and this one may use the cores "
            f"{cores}. Expected: a core for each. Run it where there are as many."
        )
    processes: list[subprocess.Popen[str]] = []
    for core, own in zip(cores, variables, strict=False):
        with _on_cores({core}):  # a process starts where its parent is, before any of its threads
            processes.append(
                subprocess.Popen(
                    list(command),
                    env={**os.environ, **own},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
    return processes


def cluster_variables(num_workers: int) -> list[dict[str, str]]:
    """Returns the `TF_CONFIG` of each worker of a cluster on this host."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(num_workers)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            )
        }
        for index in range(num_workers)
    ]


@contextlib.contextmanager
def _on_cores(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _read_answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Reads the next answer; whoever asked this process waits with a limit."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(ANSWER_PREFIX):
            return json.loads(line.removeprefix(ANSWER_PREFIX))
    raise RuntimeError(f"A worker ended with exit code {worker.wait(_END_LIMIT_S)}.")


def _end(workers: Sequence[subprocess.Popen[str]]) -> None:
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
    for worker in workers:
        worker.wait(_END_LIMIT_S)


if __name__ == "__main__":
    serve(prepare)

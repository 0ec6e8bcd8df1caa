"""Real processes of one cluster on this machine, told apart by TF_CONFIG alone."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stratagem.cluster.addresses import free_ports

PROGRAMS = Path(__file__).parent / "programs"
_ROOT = Path(__file__).parents[2]
# Far beyond what a program takes: it ends one that hangs.
_LIMIT_S = 600
_SECRET = "secret of the workers of one test"


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a worker ended.

    `code` is negative where a signal ended it.
    """

    code: int
    output: str
    errors: str


def addresses(count: int) -> list[str]:
    """As many free addresses on this host."""
    return [f"127.0.0.1:{port}" for port in free_ports(count)]


def environment(index: int, workers: Sequence[str], **variables: str) -> dict[str, str]:
    """What worker `index` finds in its environment."""
    config = {"cluster": {"worker": list(workers)}, "task": {"type": "worker", "index": index}}
    return {
        **os.environ,
        "TF_CONFIG": json.dumps(config),
        "STRATAGEM_SECRET": _SECRET,  # several hosts need one
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "jax",
        "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
        **variables,
    }


@contextmanager
def started(
    command: Sequence[str],
    count: int,
    hosts: Sequence[tuple[list[str], str]] | None = None,
    **variables: str,
) -> Iterator[list[subprocess.Popen[str]]]:
    """Starts a command once a worker; whatever is left of them is killed at the end.

    `hosts` are of `namespaces.hosts`; None runs all workers on this one.
    """
    hosts = hosts or [([], address) for address in addresses(count)]
    workers = [address for _, address in hosts]
    processes = [
        subprocess.Popen(
            [*hosts[index][0], sys.executable, *command],
            env=environment(index, workers, **variables),
            cwd=_ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for index in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


def ended(process: subprocess.Popen[str]) -> Ended:
    """Waits for a worker, and returns how it ended."""
    output, errors = process.communicate(timeout=_LIMIT_S)
    return Ended(process.returncode, output, errors)


def run_cluster(
    command: Sequence[str],
    count: int,
    hosts: Sequence[tuple[list[str], str]] | None = None,
    **variables: str,
) -> list[Ended]:
    """Runs a command once a worker, to the end."""
    with started(command, count, hosts, **variables) as processes:
        return [ended(process) for process in processes]


def run_alone(command: Sequence[str], **variables: str) -> Ended:
    """Runs a command in one process without a cluster."""
    process = subprocess.Popen(
        [sys.executable, *command],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "KERAS_BACKEND": "jax",
            "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
            **variables,
        },
        cwd=_ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return ended(process)

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
from typing import Any

import numpy as np

from stratagem.cluster.addresses import free_ports

PROGRAMS = Path(__file__).parent / "programs"
_ROOT = Path(__file__).parents[2]
# Far beyond what a program takes: it ends one that hangs.
_LIMIT_S = 600
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "KERAS_BACKEND": "jax",
    "PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)]),
}
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
        **_ENVIRONMENT,
        "TF_CONFIG": json.dumps(config),
        "STRATAGEM_SECRET": _SECRET,  # several hosts need one
        "TF_CPP_MIN_LOG_LEVEL": "2",
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
        env={**os.environ, **_ENVIRONMENT, **variables},
        cwd=_ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return ended(process)


def completed(
    command: Sequence[str],
    count: int,
    hosts: Sequence[tuple[list[str], str]] | None = None,
    **variables: str,
) -> list[Ended]:
    """Runs a command once a worker, or without a cluster for a count of 0; all must end well."""
    alone = [] if count else [run_alone(command, **variables)]
    every = alone or run_cluster(command, count, hosts, **variables)
    for one in every:
        assert one.code == 0, one.errors
    return every


def written(folder: Path, count: int) -> list[dict[str, Any]]:
    """Returns the arrays that each process has written to FOLDER/process-N.npz."""
    return [dict(np.load(folder / f"process-{rank}.npz")) for rank in range(count)]


def assert_like(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    """Compares arrays by name."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)

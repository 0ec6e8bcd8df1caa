"""Who this process is among those that train together, as its strategy tells the group."""

from __future__ import annotations

import importlib.metadata
import math
import platform

from stratagem import config, environment
from stratagem.cluster import ClusterResolver, Processes
from stratagem.cluster.addresses import split_address
from stratagem.group import Identity, Limits

__all__ = ["identity_of", "limits_of", "own_accelerators"]


def identity_of(resolver: ClusterResolver, processes: Processes) -> Identity:
    """Returns which member of its group this process is.

    Args:
        resolver: what told the cluster.
        processes: what it told.

    Returns:
        The identity, with what has to be the same on all processes.
    """
    assert processes.coordinator_address is not None
    host, port = split_address(processes.coordinator_address)
    return Identity(
        process_id=processes.process_id,
        labels=_labels(resolver, processes),
        host=host,
        port=port,
        same={
            "the cluster": str(resolver.cluster_spec()),
            **{f"{name}": _version(name) for name in ("stratagem", "jax", "jaxlib", "keras")},
            "Python": ".".join(platform.python_version_tuple()[:2]),
        },
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return "unknown"


def _labels(resolver: ClusterResolver, processes: Processes) -> tuple[str, ...]:
    """The processes by task and address, where the cluster tells them; else by number."""
    spec = resolver.cluster_spec()
    labels = [
        f"{job if job == 'chief' else f'{job} {index}'} ({spec.task_address(job, index)})"
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]
    if len(labels) == processes.num_processes:
        return tuple(labels)
    return tuple(f"process {index}" for index in range(processes.num_processes))


def limits_of(timeout_s: float | None) -> Limits:
    """Returns how long the processes wait for each other.

    Args:
        timeout_s: for a step, 0 for ever; None takes the configuration's.
    """
    stuck_s = config.stuck_timeout_s() if timeout_s is None else timeout_s or math.inf
    return Limits(
        join_s=config.join_timeout_s(),
        peer_s=config.peer_timeout_s(),
        stuck_s=stuck_s,
        barrier_s=config.barrier_timeout_s(),
    )


def own_accelerators(processes: Processes) -> list[int] | None:
    """Returns this process's part of a host's GPUs, where several share the host and see all.

    Args:
        processes: of the cluster.

    Returns:
        Their numbers among those that are visible; None for all.
    """
    count, place = processes.num_local_processes, processes.local_process_id
    if count is None or place is None or count == 1:
        return None
    gpus = environment.visible_gpus()
    if gpus is None:  # nobody has dealt them out: one each, as JAX does it
        return [place]
    share = len(gpus) // count
    return list(range(place * share, (place + 1) * share)) or None

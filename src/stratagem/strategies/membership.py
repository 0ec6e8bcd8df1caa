"""Who this process is among those that train together, as its strategy tells the group."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from typing import Any

import jax

from stratagem import config, environment
from stratagem.cluster import ClusterResolver, Processes
from stratagem.cluster.addresses import split_address
from stratagem.group import GroupLimits, Identity
from stratagem.messages import explain
from stratagem.topology.processes import start_processes

__all__ = ["check_resolver", "copy_refused", "identity_of", "join", "own_accelerators"]


def check_resolver(resolver: Any, argument: str) -> None:
    """Raises for what is no resolver.

    Args:
        resolver: a `ClusterResolver`, or None.
        argument: what the user calls it.

    Raises:
        ValueError: another type.
    """
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise ValueError(
            explain(
                f"{argument}={resolver!r} is of type {type(resolver).__name__}.",
                expected="a ClusterResolver, or None to ask the environment.",
                fix="pass sg.cluster_resolver.TFConfigClusterResolver(), for example.",
            )
        )


def join(
    resolver: ClusterResolver, processes: Processes, timeout_s: float | None = None
) -> tuple[jax.Device, ...]:
    """Joins the processes of a cluster and starts JAX for all of them.

    Args:
        resolver: what told the cluster.
        processes: what it told; more than one.
        timeout_s: how long a process may make no progress; 0 for as long as it likes, None for
            `STRATAGEM_STUCK_TIMEOUT_S`.

    Returns:
        The devices of all processes, those of each one after the other.
    """
    limits = GroupLimits(
        join_s=config.join_timeout_s(),
        peer_s=config.peer_timeout_s(),
        stuck_s=config.stuck_timeout_s() if timeout_s is None else timeout_s or math.inf,
        barrier_s=config.barrier_timeout_s(),
    )
    return start_processes(identity_of(resolver, processes), limits, own_accelerators(processes))


def copy_refused(strategy: Any) -> ValueError:
    """Returns what is raised where a strategy of several processes is copied.

    Args:
        strategy: the strategy.
    """
    return ValueError(
        explain(
            f"{strategy} was given to copy.deepcopy.",
            expected="one strategy for a cluster: its processes belong together once.",
            fix="use the strategy itself.",
        )
    )


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
    labels = _labels(resolver, processes)
    # Slices of TPUs know their own hosts only, each others.
    knows_all = labels is not None
    return Identity(
        process_id=processes.process_id,
        labels=labels or tuple(f"process {index}" for index in range(processes.num_processes)),
        host=host,
        port=port,
        same={
            "the cluster": str(resolver.cluster_spec()) if knows_all else f"that of {host}",
            **{f"{name}": _version(name) for name in ("stratagem", "jax", "jaxlib", "keras")},
            "Python": ".".join(platform.python_version_tuple()[:2]),
        },
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return "unknown"


def _labels(resolver: ClusterResolver, processes: Processes) -> tuple[str, ...] | None:
    """The processes by task and address; None where the cluster does not tell them all."""
    spec = resolver.cluster_spec()
    labels = [
        f"{job if job == 'chief' else f'{job} {index}'} ({spec.task_address(job, index)})"
        for job in ("chief", "worker")
        if job in spec.jobs
        for index in spec.task_indices(job)
    ]
    return tuple(labels) if len(labels) == processes.num_processes else None


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

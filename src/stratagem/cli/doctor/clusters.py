"""View of each cluster resolver, and whether this machine reaches the tasks of the cluster."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from stratagem import environment
from stratagem.cli.doctor.findings import Finding, Level
from stratagem.cluster.addresses import (
    UnknownHostError,
    connecting_error,
    listening_error,
    split_address,
)
from stratagem.cluster.detection import ENVIRONMENTS
from stratagem.cluster.processes import check_cluster
from stratagem.cluster.resolvers.resolver import ClusterResolver

_TOPIC = "cluster"
_CONNECT_LIMIT_S = 3.0
_MAX_THREADS = 32
_MAX_SHOWN = 8


def examine_clusters() -> list[Finding]:
    """Asks all resolvers, and tries the addresses of the first cluster that one finds."""
    findings, resolver = examine_resolvers(ENVIRONMENTS)
    if resolver is None:
        return findings
    addresses = _addresses(resolver)
    own = _own_address(resolver)
    if own is not None:
        findings += check_own_address(own)
    return findings + check_peers(
        {task: address for task, address in addresses.items() if address != own}
    )


def examine_resolvers(
    resolvers: Mapping[str, Callable[[], ClusterResolver | None]],
) -> tuple[list[Finding], ClusterResolver | None]:
    """Returns each resolver's view, and the first resolver that finds a cluster."""
    findings: list[Finding] = []
    first: ClusterResolver | None = None
    for name, make in resolvers.items():
        try:
            resolver = make()
            view = None if resolver is None else _view(name, resolver)
        except (ValueError, RuntimeError) as error:
            findings.append(_invalid(name, error))
            continue
        if resolver is not None and view is not None:
            used = "" if first is None else " It is not used: an earlier one has a cluster."
            first = first or resolver
            findings.append(Finding(_TOPIC, Level.OK, view + used))
    if not findings:
        findings.append(_no_cluster())
    return findings, first


def check_own_address(address: str) -> list[Finding]:
    """Checks that this machine can listen at its task's address."""
    error = listening_error(address)
    if isinstance(error, UnknownHostError):
        return [_unknown_host("this task", address, error)]
    if error is not None:
        return [_cannot_listen(address, error)]
    return [Finding(_TOPIC, Level.OK, f"This machine can listen at {address}.")]


def check_peers(addresses: Mapping[str, str], limit_s: float = _CONNECT_LIMIT_S) -> list[Finding]:
    """Checks that the hosts of other tasks can be reached.

    A refused connection counts as reached: the host answers, its program has not started.

    Args:
        addresses: `host:port` by task.
        limit_s: seconds to wait for each.
    """
    if not addresses:
        return []
    with ThreadPoolExecutor(min(_MAX_THREADS, len(addresses))) as threads:
        tasks, places = zip(*sorted(addresses.items()), strict=True)
        problems = threads.map(_unreachable, tasks, places, itertools.repeat(limit_s))
    found = [problem for problem in problems if problem is not None]
    if not found:
        return [Finding(_TOPIC, Level.OK, f"All {len(addresses)} other tasks can be reached.")]
    hidden = len(found) - _MAX_SHOWN
    more = [Finding(_TOPIC, Level.NOTE, f"{hidden} more tasks cannot be reached.")]
    return found[:_MAX_SHOWN] + (more if hidden > 0 else [])


def _no_cluster() -> Finding:
    if (text := environment.lookup("TF_CONFIG")) is not None and '"cluster"' not in text:
        return Finding(
            _TOPIC,
            Level.WARNING,
            "TF_CONFIG describes no cluster: it has no key 'cluster', so that this process trains "
            "alone.",
            'write {"cluster": {"worker": ["host0:2222", ...]}, "task": {"type": "worker", '
            '"index": 0}}, or unset it.',
        )
    return Finding(
        _TOPIC,
        Level.OK,
        "No cluster is described by TF_CONFIG, a launcher or a scheduler: one process trains.",
    )


def _view(name: str, resolver: ClusterResolver) -> str:
    if resolver.task_type == "ps":  # it has no rank among the processes that train
        check_cluster(resolver.cluster_spec(), "ps", resolver.task_id)
        return f"{name}: this is ps {resolver.task_id}; {_counted(resolver)}."
    processes = resolver.processes()
    task = (
        f"{resolver.task_type} {resolver.task_id}"
        if resolver.task_type is not None
        else f"process {processes.process_id}"
    )
    return (
        f"{name}: {processes.num_processes} processes in lockstep, this is {task}; "
        f"{_counted(resolver)}."
    )


def _counted(resolver: ClusterResolver) -> str:
    spec = resolver.cluster_spec()
    jobs = ", ".join(f"{spec.num_tasks(job)} {job}" for job in spec.jobs)
    return jobs or "addresses are exchanged when it starts"


def _addresses(resolver: ClusterResolver) -> dict[str, str]:
    spec = resolver.cluster_spec()
    return {
        f"{job} {index}": spec.task_address(job, index)
        for job in spec.jobs
        for index in spec.task_indices(job)
    }


def _own_address(resolver: ClusterResolver) -> str | None:
    task, index = resolver.task_type, resolver.task_id
    spec = resolver.cluster_spec()
    if task is None or index is None or task not in spec.jobs:
        return None
    return spec.task_address(task, index)


def _invalid(name: str, error: Exception) -> Finding:
    problem, _, rest = str(error).partition("\n")
    fix = rest.partition("Fix: ")[2] or f"correct the variables of {name}."
    fix = fix.replace("\nHelp: ", " Help: ")
    text = problem if problem.startswith(name) else f"{name}: {problem}"
    return Finding(_TOPIC, Level.ERROR, text, fix)


def _unknown_host(task: str, address: str, error: OSError) -> Finding:
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"The host of {task}, {split_address(address)[0]}, has no address: {error.strerror}.",
        "correct the name, or add it to DNS or /etc/hosts; in Kubernetes, create the headless "
        "Service of the job.",
    )


def _cannot_listen(address: str, error: OSError) -> Finding:
    if error.errno == errno.EADDRINUSE:
        return Finding(
            _TOPIC,
            Level.ERROR,
            f"Another program uses {address}, the address of this task.",
            f"end it (ss -ltnp 'sport = :{address.rpartition(':')[2]}' shows it), or choose "
            "another port in the cluster's description on all machines.",
        )
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"This machine cannot listen at {address}, the address of this task: {error.strerror}.",
        "check that task type and index are those of this machine.",
    )


def _unreachable(task: str, address: str, limit_s: float) -> Finding | None:
    error = connecting_error(address, limit_s)
    if error is None:
        return None
    if isinstance(error, UnknownHostError):
        return _unknown_host(task, address, error)
    reason = f"no answer within {limit_s:g} s" if error.strerror is None else error.strerror
    return Finding(
        _TOPIC,
        Level.ERROR,
        f"{task} at {address} cannot be reached: {reason}.",
        "check the host, the route and the firewall between the machines (security group, "
        "NetworkPolicy).",
    )

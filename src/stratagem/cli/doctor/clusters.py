"""View of each cluster resolver, and whether this machine reaches the tasks of the cluster."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from stratagem import environment
from stratagem.cli.doctor.findings import Finding, error, note, ok, warning
from stratagem.cluster.addresses import (
    UnknownHostError,
    connecting_error,
    listening_error,
    split_address,
)
from stratagem.cluster.detection import ENVIRONMENTS
from stratagem.cluster.processes import check_cluster
from stratagem.cluster.resolvers.resolver import ClusterResolver

_CONNECT_LIMIT_S = 3.0
_MAX_THREADS = 32
_MAX_SHOWN = 8


def examine_clusters() -> Iterator[Finding]:
    """Asks all resolvers, and tries the addresses of the first cluster that one finds."""
    findings, resolver = examine_resolvers(ENVIRONMENTS)
    yield from findings
    if resolver is None:
        return
    spec = resolver.cluster_spec()
    addresses: dict[tuple[str | None, int | None], str] = {
        (job, index): spec.task_address(job, index)
        for job in spec.jobs
        for index in spec.task_indices(job)
    }
    own = addresses.pop((resolver.task_type, resolver.task_id), None)
    if own is not None:
        yield check_own_address(own)
    yield from check_peers({f"{job} {index}": one for (job, index), one in addresses.items()})


def examine_resolvers(
    resolvers: Mapping[str, Callable[[], ClusterResolver | None]],
) -> tuple[list[Finding], ClusterResolver | None]:
    """Returns each resolver's view, and the first resolver that finds a cluster."""
    findings: list[Finding] = []
    first: ClusterResolver | None = None
    for name, make in resolvers.items():
        try:
            if (resolver := make()) is not None:
                used = "" if first is None else " It is not used: an earlier one has a cluster."
                findings.append(ok(_view(name, resolver) + used))
                first = first or resolver
        except (ValueError, RuntimeError) as wrong:
            problem, _, rest = str(wrong).partition("\n")
            fix = rest.partition("Fix: ")[2] or f"correct the variables of {name}."
            text = problem if problem.startswith(name) else f"{name}: {problem}"
            findings.append(error(text, fix.replace("\nHelp: ", " Help: ")))
    if findings:
        return findings, first
    if '"cluster"' not in (environment.lookup("TF_CONFIG") or '"cluster"'):
        lone = warning(
            "TF_CONFIG describes no cluster: it has no key 'cluster', so that this process trains "
            "alone.",
            'write {"cluster": {"worker": ["host0:2222", ...]}, "task": {"type": "worker", '
            '"index": 0}}, or unset it.',
        )
        return [lone], None
    text = "No cluster is described by TF_CONFIG, a launcher or a scheduler: one process trains."
    return [ok(text)], None


def check_own_address(address: str) -> Finding:
    """Checks that this machine can listen at its task's address."""
    reason = listening_error(address)
    if reason is None:
        return ok(f"This machine can listen at {address}.")
    if isinstance(reason, UnknownHostError):
        return _unknown_host("this task", address, reason)
    if reason.errno == errno.EADDRINUSE:
        return error(
            f"Another program uses {address}, the address of this task.",
            f"end it (ss -ltnp 'sport = :{address.rpartition(':')[2]}' shows it), or choose "
            "another port in the cluster's description on all machines.",
        )
    return error(
        f"This machine cannot listen at {address}, the address of this task: {reason.strerror}.",
        "check that task type and index are those of this machine.",
    )


def check_peers(
    addresses: Mapping[str, str], limit_s: float = _CONNECT_LIMIT_S
) -> Iterator[Finding]:
    """Checks that the hosts of other tasks, `host:port` by task, can be reached in `limit_s` each.

    A refused connection counts as reached: the host answers, its program has not started.
    """
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        reasons = threads.map(lambda one: connecting_error(one, limit_s), addresses.values())
        tried = list(zip(addresses.items(), reasons, strict=True))
    lost = [(*place, reason) for place, reason in tried if reason is not None]
    if addresses and not lost:
        yield ok(f"All {len(addresses)} other tasks can be reached.")
    for task, address, reason in lost[:_MAX_SHOWN]:
        if isinstance(reason, UnknownHostError):
            yield _unknown_host(task, address, reason)
        else:
            why = reason.strerror or f"no answer within {limit_s:g} s"
            yield error(
                f"{task} at {address} cannot be reached: {why}.",
                "check the host, the route and the firewall between the machines (security group, "
                "NetworkPolicy).",
            )
    if len(lost) > _MAX_SHOWN:
        yield note(f"{len(lost) - _MAX_SHOWN} more tasks cannot be reached.")


def _view(name: str, resolver: ClusterResolver) -> str:
    spec = resolver.cluster_spec()
    jobs = ", ".join(f"{spec.num_tasks(job)} {job}" for job in spec.jobs)
    counts = jobs or "addresses are exchanged when it starts"
    if resolver.task_type == "ps":  # it has no rank among the processes that train
        check_cluster(spec, "ps", resolver.task_id)
        return f"{name}: this is ps {resolver.task_id}; {counts}."
    processes = resolver.processes()
    task = f"process {processes.process_id}"
    if resolver.task_type is not None:
        task = f"{resolver.task_type} {resolver.task_id}"
    return f"{name}: {processes.num_processes} processes in lockstep, this is {task}; {counts}."


def _unknown_host(task: str, address: str, reason: OSError) -> Finding:
    return error(
        f"The host of {task}, {split_address(address)[0]}, has no address: {reason.strerror}.",
        "correct the name, or add it to DNS or /etc/hosts; in Kubernetes, create the headless "
        "Service of the job.",
    )

"""Number, rank and coordinator of the processes that train together."""

from __future__ import annotations

import dataclasses

from stratagem.cluster.addresses import (
    is_every_interface,
    is_loopback,
    split_address,
    without_scheme,
)
from stratagem.cluster.roles import check_task, id_in_cluster, task_count, worker_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import invalid

# Validation of cluster specifications, before any process waits for an unreachable task.


def check_cluster(
    cluster_spec: ClusterSpec, task_type: str | None, task_id: int | str | None
) -> None:
    """Raises if a cluster is invalid, as seen from one of its tasks.

    Args:
        cluster_spec: the cluster; empty for a single process.
        task_type: type of this process's task; may be None if the cluster has one task.
        task_id: index of this process's task.

    Raises:
        ValueError: an unknown job or task type; several chiefs or evaluators; a task that is not in
            the cluster, or None in a cluster of several; an address that is not `host:port`; a
            duplicate address; a loopback address in a cluster of several hosts.
    """
    if not cluster_spec:
        return
    check_task(cluster_spec, task_type, task_id)
    owners = _owners(cluster_spec)
    if task_type is None and len(owners) > 1:
        raise invalid(
            f"The cluster has {len(owners)} tasks, but the task of this process is unknown.",
            expected="the task's type and index.",
            fix='set the resolver\'s task_type and task_id, or "task" in TF_CONFIG.',
            code="SG502",
        )
    check_addresses(cluster_spec)


def _owners(cluster_spec: ClusterSpec) -> list[tuple[str, str]]:
    """Returns the name and address of each task."""
    return [
        (f"{job} {index}", cluster_spec.task_address(job, index))
        for job in cluster_spec.jobs
        for index in cluster_spec.task_indices(job)
    ]


def check_addresses(cluster_spec: ClusterSpec) -> None:
    """Raises ValueError for malformed and duplicate addresses, and for unreachable ones."""
    owners = _owners(cluster_spec)
    taken: dict[tuple[str, int], str] = {}
    for owner, address in owners:
        location = split_address(address)
        if location in taken:
            raise invalid(
                f"{taken[location]} and {owner} have the same address {address!r}.",
                expected="a different address for each task.",
                fix="give tasks on one host different ports.",
                code="SG503",
            )
        taken[location] = owner
    if all(is_loopback(host) for host, _ in taken):
        return
    for owner, address in owners:
        host = split_address(address)[0]
        if is_loopback(host) or is_every_interface(host):
            raise invalid(
                f"{owner} has the address {address!r}, in a cluster of several hosts.",
                expected="an address that the other hosts can reach.",
                fix="use the host's name or IP address. Loopback works only if all tasks use it.",
                code="SG503",
            )


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that train in lockstep: the arguments of `jax.distributed.initialize`.

    Args:
        num_processes: number of processes.
        process_id: rank of this process, from 0.
        coordinator_address: `host:port` of process 0; may be None only for one process.
        local_process_id: rank of this process on its host; None if unknown.
        num_local_processes: number of processes on this host; None if unknown. Several share the
            host's accelerators, unless their launcher has assigned them.

    Raises:
        ValueError: a rank out of range, no process, or several without a coordinator.

    Example:
        >>> sg.cluster.Processes(4, 2, "10.0.0.1:2222").process_id
        2

    Source: JAX, jax.distributed.initialize.
    """

    num_processes: int
    process_id: int
    coordinator_address: str | None = None
    local_process_id: int | None = None
    num_local_processes: int | None = None

    def __post_init__(self) -> None:
        _check_index("process_id", self.process_id, "num_processes", self.num_processes)
        if self.local_process_id is not None and self.num_local_processes is not None:
            _check_index(
                "local_process_id",
                self.local_process_id,
                "num_local_processes",
                self.num_local_processes,
            )
        if self.coordinator_address is not None:
            split_address(self.coordinator_address)
        elif self.num_processes > 1:
            raise invalid(
                f"{self.num_processes} processes have no coordinator_address.",
                expected="host:port of process 0.",
                fix="set JAX_COORDINATOR_ADDRESS, or pass coordinator_address.",
            )


def _check_index(name: str, index: int, total_name: str, total: int) -> None:
    if not 0 <= index < total:
        raise invalid(
            f"{name}={index} is out of range for {total_name}={total}.",
            expected=f"0 <= {name} < {total_name}.",
            fix=f"number processes from 0, and start {total_name} of them.",
        )


def processes_of_task(
    cluster_spec: ClusterSpec, task_type: str | None, task_id: int | str | None
) -> Processes:
    """Returns the processes with which a task of a cluster trains.

    Args:
        cluster_spec: the cluster.
        task_type: type of the task.
        task_id: index of the task.

    Returns:
        The chief and the workers, with the leader as coordinator. The evaluator, or a process
        without a cluster, is alone.

    Raises:
        ValueError: the cluster is invalid (`check_cluster`), the task is a parameter server, or the
            workers' indices have gaps.
    """
    check_cluster(cluster_spec, task_type, task_id)
    if not cluster_spec or task_type == "evaluator":
        return Processes(1, 0)
    if task_type is None:
        # check_cluster allows this only in a cluster of one task.
        (task_type,) = (job for job in cluster_spec.jobs if cluster_spec.num_tasks(job))
        (task_id,) = cluster_spec.task_indices(task_type)
        return processes_of_task(cluster_spec, task_type, task_id)
    process_id = id_in_cluster(cluster_spec, task_type, task_id)
    for job in ("chief", "worker"):
        if None in (cluster_spec.job_tasks(job) if job in cluster_spec.jobs else []):
            raise invalid(
                f"The cluster lists only {job}s {cluster_spec.task_indices(job)}.",
                expected="all tasks that train together, without gaps.",
                fix="add the missing addresses, or renumber the tasks from 0.",
            )
    leader = "chief" if task_count(cluster_spec, "chief") else "worker"
    return Processes(
        num_processes=worker_count(cluster_spec, task_type),
        process_id=process_id,
        coordinator_address=without_scheme(cluster_spec.task_address(leader, 0)),
    )

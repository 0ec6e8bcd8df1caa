"""How many processes train together, which of them this one is, and where they meet."""

from __future__ import annotations

import dataclasses

from stratagem.cluster.addresses import split_address, without_scheme
from stratagem.cluster.checks import check_cluster
from stratagem.cluster.roles import id_in_cluster, task_count, worker_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.messages import explain

__all__ = ["Processes", "processes_of_task"]


@dataclasses.dataclass(frozen=True)
class Processes:
    """The processes that train in lockstep: what `jax.distributed.initialize` has to be told.

    Args:
        num_processes: how many there are.
        process_id: which of them this one is, from 0.
        coordinator_address: `host:port` of process 0, where all meet; None only for one process.
        local_process_id: which of the processes on this host this one is; None if unknown.
        num_local_processes: how many processes there are on this host; None if unknown. More than
            one share the host's accelerators, unless their launcher has dealt them out.

    Raises:
        ValueError: an id past the end, no process, or several that do not know where to meet.

    Example:
        >>> sg.cluster.Processes(4, 2, "10.0.0.1:2222").process_id
        2
    """

    num_processes: int
    process_id: int
    coordinator_address: str | None = None
    local_process_id: int | None = None
    num_local_processes: int | None = None

    def __post_init__(self) -> None:
        _check_place("process_id", self.process_id, "num_processes", self.num_processes)
        if self.local_process_id is not None and self.num_local_processes is not None:
            _check_place(
                "local_process_id",
                self.local_process_id,
                "num_local_processes",
                self.num_local_processes,
            )
        if self.coordinator_address is not None:
            split_address(self.coordinator_address)
        elif self.num_processes > 1:
            raise ValueError(
                explain(
                    f"{self.num_processes} processes came without a coordinator_address.",
                    expected="host:port of process 0, where they meet.",
                    fix="set JAX_COORDINATOR_ADDRESS, or pass the address.",
                )
            )


def _check_place(name: str, index: int, total_name: str, total: int) -> None:
    if not 0 <= index < total:
        raise ValueError(
            explain(
                f"{name}={index} with {total_name}={total}.",
                expected=f"0 <= {name} < {total_name}.",
                fix="count processes from 0, and start as many as are announced.",
            )
        )


def processes_of_task(
    cluster_spec: ClusterSpec, task_type: str | None, task_id: int | str | None
) -> Processes:
    """Returns the processes that a task of a cluster trains together with.

    Args:
        cluster_spec: the cluster.
        task_type: the task's type.
        task_id: its index.

    Returns:
        The chief and the workers, who meet at the leader's address; the evaluator, and a process
        without a cluster, are alone.

    Raises:
        ValueError: the cluster cannot be right (`check_cluster`), the task is a parameter server,
            or the indices of the workers have holes.

    Example:
        >>> spec = sg.ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})
        >>> found = sg.cluster.processes_of_task(spec, "worker", 0)
        >>> found.num_processes, found.process_id, found.coordinator_address
        (2, 1, 'a:1')
    """
    check_cluster(cluster_spec, task_type, task_id)
    if not cluster_spec or task_type == "evaluator":
        return Processes(1, 0)
    if task_type is None:
        # One task in all, as check_cluster has seen: it is this one.
        (task_type,) = (job for job in cluster_spec.jobs if cluster_spec.num_tasks(job))
        (task_id,) = cluster_spec.task_indices(task_type)
        return processes_of_task(cluster_spec, task_type, task_id)
    process_id = id_in_cluster(cluster_spec, task_type, task_id)
    for job in ("chief", "worker"):
        if None in (cluster_spec.job_tasks(job) if job in cluster_spec.jobs else []):
            raise ValueError(
                explain(
                    f"Only {job}s {cluster_spec.task_indices(job)} are known.",
                    expected="all tasks that train together, without holes.",
                    fix="list the missing addresses too, or renumber the tasks from 0.",
                )
            )
    leader = "chief" if task_count(cluster_spec, "chief") else "worker"
    return Processes(
        num_processes=worker_count(cluster_spec, task_type),
        process_id=process_id,
        coordinator_address=without_scheme(cluster_spec.task_address(leader, 0)),
    )

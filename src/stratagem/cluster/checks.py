"""What a cluster cannot be: said before anybody waits for a task that will never answer."""

from __future__ import annotations

from stratagem.cluster.addresses import is_loopback, split_address
from stratagem.cluster.roles import check_task
from stratagem.cluster.spec import ClusterSpec
from stratagem.messages import explain

__all__ = ["check_addresses", "check_cluster"]


def check_cluster(
    cluster_spec: ClusterSpec, task_type: str | None, task_id: int | str | None
) -> None:
    """Raises for a cluster that cannot be right, seen from one of its tasks.

    Args:
        cluster_spec: the cluster; an empty one is fine, it is this process alone.
        task_type: this process's task type; None is fine where the cluster has one task.
        task_id: its index.

    Raises:
        ValueError: a job or a task type of another name; two chiefs or two evaluators; a task that
            is not in the cluster; no task, in a cluster of several; an address that is not
            `host:port`; an address that stands twice; a loopback address among several hosts.

    Example:
        >>> spec = sg.ClusterSpec({"worker": ["localhost:1", "10.0.0.2:1"]})
        >>> sg.cluster.check_cluster(spec, "worker", 0)
        Traceback (most recent call last):
        ...
        ValueError: worker 0 has the loopback address 'localhost:1', in a cluster of several hosts.
        ...
    """
    if not cluster_spec:
        return
    check_task(cluster_spec, task_type, task_id)
    owners = _owners(cluster_spec)
    if task_type is None and len(owners) > 1:
        raise ValueError(
            explain(
                f"The cluster has {len(owners)} tasks, and this process does not know which it is.",
                expected="the task's type and index.",
                fix='set the resolver\'s task_type and task_id, or "task" in TF_CONFIG.',
            )
        )
    check_addresses(cluster_spec)


def _owners(cluster_spec: ClusterSpec) -> list[tuple[str, str]]:
    """The name of each task, and its address."""
    return [
        (f"{job} {index}", cluster_spec.task_address(job, index))
        for job in cluster_spec.jobs
        for index in cluster_spec.task_indices(job)
    ]


def check_addresses(cluster_spec: ClusterSpec) -> None:
    """Raises for addresses that cannot be right.

    Raises:
        ValueError: one that is not `host:port`, or stands twice, or is a loopback address among
            several hosts.
    """
    owners = _owners(cluster_spec)
    taken: dict[tuple[str, int], str] = {}
    for owner, address in owners:
        place = split_address(address)
        if place in taken:
            raise ValueError(
                explain(
                    f"{taken[place]} and {owner} have the same address {address!r}.",
                    expected="an address of its own for each task.",
                    fix="give tasks on one host different ports.",
                )
            )
        taken[place] = owner
    if all(is_loopback(host) for host, _ in taken):
        return
    for owner, address in owners:
        if is_loopback(split_address(address)[0]):
            raise ValueError(
                explain(
                    f"{owner} has the loopback address {address!r}, in a cluster of several hosts.",
                    expected="an address at which the other hosts reach it.",
                    fix="write the host's name or IP address; loopback works where all tasks use "
                    "it.",
                )
            )

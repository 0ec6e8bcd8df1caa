"""Validation of cluster specifications, before any process waits for an unreachable task."""

from __future__ import annotations

from stratagem.cluster.addresses import is_loopback, split_address
from stratagem.cluster.roles import check_task
from stratagem.cluster.spec import ClusterSpec
from stratagem.messages import explain


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

    Example:
        >>> spec = sg.ClusterSpec({"worker": ["localhost:1", "10.0.0.2:1"]})
        >>> sg.cluster.check_cluster(spec, "worker", 0)
        Traceback (most recent call last):
        ...
        ValueError: worker 0 has the loopback address 'localhost:1', in a cluster of several hosts.
        ...

    Source: specific to Stratagem.
    """
    if not cluster_spec:
        return
    check_task(cluster_spec, task_type, task_id)
    owners = _owners(cluster_spec)
    if task_type is None and len(owners) > 1:
        raise ValueError(
            explain(
                f"The cluster has {len(owners)} tasks, but the task of this process is unknown.",
                expected="the task's type and index.",
                fix='set the resolver\'s task_type and task_id, or "task" in TF_CONFIG.',
                code="SG502",
            )
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
    """Raises ValueError for malformed, duplicate, or unreachable loopback addresses."""
    owners = _owners(cluster_spec)
    taken: dict[tuple[str, int], str] = {}
    for owner, address in owners:
        location = split_address(address)
        if location in taken:
            raise ValueError(
                explain(
                    f"{taken[location]} and {owner} have the same address {address!r}.",
                    expected="a different address for each task.",
                    fix="give tasks on one host different ports.",
                    code="SG503",
                )
            )
        taken[location] = owner
    if all(is_loopback(host) for host, _ in taken):
        return
    for owner, address in owners:
        if is_loopback(split_address(address)[0]):
            raise ValueError(
                explain(
                    f"{owner} has the loopback address {address!r}, in a cluster of several hosts.",
                    expected="an address that the other hosts can reach.",
                    fix="use the host's name or IP address. Loopback works only if all tasks use "
                    "it.",
                    code="SG503",
                )
            )

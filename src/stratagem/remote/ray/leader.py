"""Which tasks a cluster has, and which of them the others look for."""

from __future__ import annotations

from stratagem.cluster import ClusterSpec, task_count
from stratagem.cluster.roles import TASK_TYPES
from stratagem.messages import explain

__all__ = ["leader_of", "tasks_of"]


def tasks_of(spec: ClusterSpec) -> list[tuple[str, int]]:
    """Returns all tasks of a cluster.

    Args:
        spec: the cluster.

    Returns:
        Type and index of each: the chief, the workers, the servers, the evaluator.
    """
    return [
        (job, index)
        for job in TASK_TYPES
        if task_count(spec, job)
        for index in spec.task_indices(job)
    ]


def leader_of(spec: ClusterSpec) -> tuple[str, int]:
    """Returns the task at whose address the others meet.

    Args:
        spec: the cluster.

    Returns:
        The chief; without one the first worker, or else the first of all.

    Raises:
        ValueError: a cluster without tasks.

    Example:
        >>> leader_of(ClusterSpec({"ps": ["a:1"], "worker": ["b:1", "c:1"]}))
        ('worker', 0)
    """
    tasks = tasks_of(spec)
    if not tasks:
        raise ValueError(
            explain(
                f"The cluster {spec!r} has no task.",
                expected="at least one task with its address.",
                fix='pass {"chief": ["host0:2222"], "worker": ["host1:2222"]}, for example.',
            )
        )
    return tasks[0]

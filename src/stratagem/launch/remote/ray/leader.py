"""Tasks of a cluster, and its leader, at whose address the others join."""

from __future__ import annotations

from stratagem.cluster.roles import TASK_TYPES, task_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import explain


def tasks_of(spec: ClusterSpec) -> list[tuple[str, int]]:
    """Returns type and index of every task: chief, workers, parameter servers, evaluator."""
    return [
        (job, index)
        for job in TASK_TYPES
        if task_count(spec, job)
        for index in spec.task_indices(job)
    ]


def leader_of(spec: ClusterSpec) -> tuple[str, int]:
    """Returns the chief, else the first worker, else the first task; ValueError without tasks."""
    tasks = tasks_of(spec)
    if not tasks:
        raise ValueError(
            explain(
                f"The cluster {spec!r} has no tasks.",
                expected="at least one task with its address.",
                fix='pass {"chief": ["host0:2222"], "worker": ["host1:2222"]}, for example.',
            )
        )
    return tasks[0]

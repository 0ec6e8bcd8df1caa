"""Roles of tasks in a cluster: chief, worker count, rank, leader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.cluster.spec import EXAMPLE, ClusterDef, ClusterSpec, parse_task_index
from stratagem.errors import check_type, invalid

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

# Jobs with at most one task.
_SINGLE = ("chief", "evaluator")

_Cluster = Mapping[str, Any] | ClusterDef | ClusterSpec


def normalize_cluster_spec(cluster_spec: _Cluster) -> ClusterSpec:
    """Converts a cluster to a `ClusterSpec`.

    Args:
        cluster_spec: a dict, a `ClusterDef` or a `ClusterSpec`.

    Returns:
        The spec.

    Raises:
        ValueError: another type.

    Example:
        >>> sg.cluster.normalize_cluster_spec({"worker": ["a:1"]})
        ClusterSpec({'worker': ['a:1']})

    Source: TF 2.21 multi_worker_util.py, normalize_cluster_spec.
    """
    check_type(
        "cluster_spec",
        cluster_spec,
        Mapping | ClusterDef | ClusterSpec,
        "a dict, a ClusterDef or a ClusterSpec",
        f"pass a cluster such as {EXAMPLE}.",
        error=ValueError,
    )
    return cluster_spec if isinstance(cluster_spec, ClusterSpec) else ClusterSpec(cluster_spec)


def task_count(cluster_spec: ClusterSpec, task_type: str) -> int:
    """Returns the number of tasks of a type.

    Args:
        cluster_spec: the cluster.
        task_type: any type; one that is not in the cluster has 0 tasks.

    Returns:
        The number of tasks.

    Example:
        >>> spec = sg.ClusterSpec({"worker": ["a:1", "b:1"]})
        >>> sg.cluster.task_count(spec, "worker"), sg.cluster.task_count(spec, "ps")
        (2, 0)

    Source: TF 2.21 multi_worker_util.py, task_count.
    """
    return cluster_spec.num_tasks(task_type) if task_type in cluster_spec.jobs else 0


def is_chief(
    cluster_spec: _Cluster,
    task_type: str | None = None,
    task_id: int | str | None = None,
) -> bool:
    """Returns True for the task that does the work that only one task may do.

    Args:
        cluster_spec: the cluster.
        task_type: type of the task.
        task_id: index of the task.

    Returns:
        True for the chief, for worker 0 without a chief, and for the evaluator, which works alone.

    Raises:
        ValueError: an invalid cluster, or a task that is not in it.

    Example:
        >>> sg.cluster.is_chief({"worker": ["a:1", "b:1"]}, "worker", 0)
        True

    Source: TF 2.21 multi_worker_util.py, is_chief.
    """
    spec = normalize_cluster_spec(cluster_spec)
    index = check_task(spec, task_type, task_id)
    if task_type in _SINGLE:
        return True
    return task_type == "worker" and index == 0 and not task_count(spec, "chief")


def worker_count(cluster_spec: _Cluster, task_type: str | None) -> int:
    """Returns the number of tasks that work together with a task of this type.

    Args:
        cluster_spec: the cluster.
        task_type: "chief", "worker", or "evaluator", which works alone.

    Returns:
        Number of workers, including the chief; 1 for the evaluator.

    Raises:
        ValueError: another type, or one that is not in the cluster.

    Example:
        >>> sg.cluster.worker_count({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker")
        3

    Source: TF 2.21 multi_worker_util.py, worker_count.
    """
    spec = normalize_cluster_spec(cluster_spec)
    _check_jobs(spec)
    _check_type(spec, task_type)
    if task_type == "evaluator":
        return 1
    if task_type not in ("chief", "worker"):
        raise invalid(
            f"task_type={task_type!r} does not count as a worker.",
            expected='"chief", "worker" or "evaluator".',
            fix="call task_count(cluster_spec, task_type) to count the tasks of one type.",
        )
    return task_count(spec, "chief") + task_count(spec, "worker")


def id_in_cluster(cluster_spec: _Cluster, task_type: str | None, task_id: int | str | None) -> int:
    """Returns the rank of a task among those that train together.

    Args:
        cluster_spec: the cluster.
        task_type: "chief", "worker" or "evaluator".
        task_id: index of the task.

    Returns:
        0 for the chief; a worker's index plus the number of chiefs; the evaluator's index.

    Raises:
        ValueError: a parameter server, which has no rank, or a task that is not in the cluster.

    Example:
        >>> sg.cluster.id_in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
        2

    Source: TF 2.21 multi_worker_util.py, id_in_cluster.
    """
    spec = normalize_cluster_spec(cluster_spec)
    index = check_task(spec, task_type, task_id)
    if index is None or task_type == "ps":
        raise invalid(
            f"A task of type {task_type!r} has no rank in the cluster.",
            expected='"chief", "worker" or "evaluator".',
            fix="use the index of a parameter server; servers do not train in lockstep.",
        )
    return index + task_count(spec, "chief") if task_type == "worker" else index


def collective_leader(
    cluster_spec: _Cluster, task_type: str | None, task_id: int | str | None
) -> str:
    """Returns the name of the task that leads the collectives of this task's cluster.

    Args:
        cluster_spec: the cluster.
        task_type: type of this task.
        task_id: index of this task.

    Returns:
        Name of the chief, or of worker 0 without a chief; "" without a cluster and for the
        evaluator.

    Raises:
        ValueError: a task that is not in the cluster, or a cluster without chief and workers.

    Example:
        >>> sg.cluster.collective_leader({"worker": ["a:1", "b:1"]}, "worker", 1)
        '/job:worker/replica:0/task:0'

    Source: TF 2.21 multi_worker_util.py, collective_leader.
    """
    spec = normalize_cluster_spec(cluster_spec)
    if not spec:
        return ""
    check_task(spec, task_type, task_id)
    if task_type == "evaluator":
        return ""
    for job in ("chief", "worker"):
        if task_count(spec, job):
            return f"/job:{job}/replica:0/task:0"
    raise invalid(
        f"The cluster has neither a chief nor a worker, only the jobs {spec.jobs}.",
        expected="a chief or at least one worker to lead it.",
        fix='add a "chief" or a "worker" to the cluster.',
    )


def check_task(spec: ClusterSpec, task_type: str | None, task_id: int | str | None) -> int | None:
    """Raises ValueError for an invalid cluster or a task that is not in it; returns the index.

    Without a task type, checks only the cluster and returns None. The evaluator may be missing from
    the cluster.

    Source: TF 2.21 multi_worker_util.py, _validate_cluster_spec.
    """
    _check_jobs(spec)
    _check_type(spec, task_type)
    if task_type is None:
        return None
    if task_id is None:
        raise invalid(
            f"Task type {task_type!r} was passed without a task id.",
            expected=f"the index of the task: one of {_indices(spec, task_type)}.",
            fix="pass task_id, or set the index in TF_CONFIG's task.",
            code="SG502",
        )
    index = parse_task_index(task_id)
    if index not in _indices(spec, task_type):
        raise invalid(
            f"Task id {index} of {task_type!r} is not in the cluster {spec!r}.",
            expected=f"one of {_indices(spec, task_type)}.",
            fix="number tasks from 0, or add this task's address to the cluster.",
            code="SG502",
        )
    return index


def _indices(spec: ClusterSpec, task_type: str) -> list[int]:
    return spec.task_indices(task_type) if task_type in spec.jobs else [0]


def _check_jobs(spec: ClusterSpec) -> None:
    unknown = [job for job in spec.jobs if job not in TASK_TYPES]
    if unknown:
        raise invalid(
            f"The cluster has unknown jobs {unknown}.",
            expected=f"jobs among {list(TASK_TYPES)}.",
            fix="rename them. The 'master' of old scripts is 'chief'.",
        )
    for job in _SINGLE:
        if task_count(spec, job) > 1:
            raise invalid(
                f"The cluster has {task_count(spec, job)} tasks in job {job!r}.",
                expected=f"at most one {job}.",
                fix="make the others workers.",
            )


def _check_type(spec: ClusterSpec, task_type: str | None) -> None:
    if task_type is not None and task_type not in TASK_TYPES:
        raise invalid(
            f"Task type {task_type!r} is unknown.",
            expected=f"one of {list(TASK_TYPES)}.",
            fix="correct the type. The 'master' of old scripts is 'chief'.",
        )
    if task_type is not None and task_type not in spec.jobs and task_type != "evaluator":
        raise invalid(
            f"Task type {task_type!r} is not in the cluster {spec!r}.",
            expected=f"one of its jobs: {spec.jobs}.",
            fix="add the task's address to the cluster, or correct the task's type.",
            code="SG502",
        )

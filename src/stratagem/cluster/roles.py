"""What a task does in its cluster, and which number it has among those that train together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stratagem.cluster.spec import ClusterDef, ClusterSpec, parse_task_index
from stratagem.messages import explain

__all__ = [
    "TASK_TYPES",
    "check_task",
    "collective_leader",
    "id_in_cluster",
    "is_chief",
    "normalize_cluster_spec",
    "task_count",
    "worker_count",
]

TASK_TYPES = ("chief", "worker", "ps", "evaluator")

# Jobs of which there is one task at most.
_SINGLE = ("chief", "evaluator")

_Cluster = Mapping[str, Any] | ClusterDef | ClusterSpec


def normalize_cluster_spec(cluster_spec: _Cluster) -> ClusterSpec:
    """Returns a cluster as a `ClusterSpec`, whichever way it was given.

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
    if isinstance(cluster_spec, ClusterSpec):
        return cluster_spec
    if isinstance(cluster_spec, Mapping | ClusterDef):
        return ClusterSpec(cluster_spec)
    raise ValueError(
        explain(
            f"cluster_spec={cluster_spec!r} is of type {type(cluster_spec).__name__}.",
            expected="a dict, a ClusterDef or a ClusterSpec.",
            fix='pass {"worker": ["host0:2222", "host1:2222"]}, for example.',
        )
    )


def task_count(cluster_spec: ClusterSpec, task_type: str) -> int:
    """Returns how many tasks of a type there are.

    Args:
        cluster_spec: the cluster.
        task_type: any type; one that is not in the cluster has no task.

    Returns:
        Their number.

    Source: TF 2.21 multi_worker_util.py, task_count.
    """
    return cluster_spec.num_tasks(task_type) if task_type in cluster_spec.jobs else 0


def is_chief(
    cluster_spec: _Cluster,
    task_type: str | None = None,
    task_id: int | str | None = None,
) -> bool:
    """Returns whether a task is the one that does what only one may do.

    Args:
        cluster_spec: the cluster.
        task_type: the task's type.
        task_id: its index.

    Returns:
        True for the chief, for worker 0 where there is no chief, and for the evaluator, which is a
        cluster of its own.

    Raises:
        ValueError: no such cluster, or no such task in it.

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
    """Returns how many tasks work together with a task of this type.

    Args:
        cluster_spec: the cluster.
        task_type: "chief" or "worker", or "evaluator", which is a cluster of its own.

    Returns:
        The number of workers, the chief included; 1 for the evaluator.

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
        raise ValueError(
            explain(
                f"task_type={task_type!r} is not counted among the workers.",
                expected='"chief", "worker" or "evaluator".',
                fix="ask task_count(cluster_spec, task_type) for the tasks of one type.",
            )
        )
    return task_count(spec, "chief") + task_count(spec, "worker")


def id_in_cluster(cluster_spec: _Cluster, task_type: str | None, task_id: int | str | None) -> int:
    """Returns the number of a task among those that train together.

    Args:
        cluster_spec: the cluster.
        task_type: "chief", "worker" or "evaluator".
        task_id: the task's index.

    Returns:
        0 for the chief; a worker's index plus the number of chiefs; the evaluator's index.

    Raises:
        ValueError: a parameter server, which has no such number, or no such task.

    Example:
        >>> sg.cluster.id_in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
        2

    Source: TF 2.21 multi_worker_util.py, id_in_cluster.
    """
    spec = normalize_cluster_spec(cluster_spec)
    index = check_task(spec, task_type, task_id)
    if index is None or task_type == "ps":
        raise ValueError(
            explain(
                f"There is no id for task_type {task_type!r}.",
                expected='"chief", "worker" or "evaluator".',
                fix="parameter servers do not train in lockstep: use their index alone.",
            )
        )
    return index + task_count(spec, "chief") if task_type == "worker" else index


def collective_leader(
    cluster_spec: _Cluster, task_type: str | None, task_id: int | str | None
) -> str:
    """Returns the name of the task that leads the collectives of this task's cluster.

    Args:
        cluster_spec: the cluster.
        task_type: this task's type.
        task_id: its index.

    Returns:
        The chief's name, or worker 0's without a chief; "" for no cluster and for the evaluator.

    Raises:
        ValueError: no such task, or a cluster with neither a chief nor a worker.

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
    raise ValueError(
        explain(
            f"The cluster has only the jobs {spec.jobs}.",
            expected="a chief or at least one worker to lead it.",
            fix='add a "chief" or a "worker" to the cluster.',
        )
    )


def check_task(spec: ClusterSpec, task_type: str | None, task_id: int | str | None) -> int | None:
    """Raises unless a cluster has the jobs that there can be, and a task is one of its tasks.

    Args:
        spec: the cluster.
        task_type: the task's type; None checks the cluster alone.
        task_id: the task's index.

    Returns:
        The index as a number, None without a task type.

    Raises:
        ValueError: a job of another name, two chiefs or evaluators, or no such task. The evaluator
            need not be in the cluster.

    Source: TF 2.21 multi_worker_util.py, _validate_cluster_spec.
    """
    _check_jobs(spec)
    _check_type(spec, task_type)
    if task_type is None:
        return None
    if task_id is None:
        raise ValueError(
            explain(
                f"Task type {task_type!r} came without a task id.",
                expected=f"its index: one of {_indices(spec, task_type)}.",
                fix="pass task_id, or set the index in TF_CONFIG's task.",
            )
        )
    index = parse_task_index(task_id)
    if index not in _indices(spec, task_type):
        raise ValueError(
            explain(
                f"Task id {index} of {task_type!r} is past the end or left out.",
                expected=f"one of {_indices(spec, task_type)}: {spec!r}.",
                fix="count tasks from 0, or add this task's address to the cluster.",
            )
        )
    return index


def _indices(spec: ClusterSpec, task_type: str) -> list[int]:
    return spec.task_indices(task_type) if task_type in spec.jobs else [0]


def _check_jobs(spec: ClusterSpec) -> None:
    strange = [job for job in spec.jobs if job not in TASK_TYPES]
    if strange:
        raise ValueError(
            explain(
                f"The cluster has jobs {strange}.",
                expected=f"jobs among {list(TASK_TYPES)}.",
                fix="rename them; the oldest scripts' 'master' is 'chief'.",
            )
        )
    for job in _SINGLE:
        if task_count(spec, job) > 1:
            raise ValueError(
                explain(
                    f"The cluster has {task_count(spec, job)} tasks in job {job!r}.",
                    expected=f"at most one {job}.",
                    fix="make the others workers.",
                )
            )


def _check_type(spec: ClusterSpec, task_type: str | None) -> None:
    if task_type is not None and task_type not in TASK_TYPES:
        raise ValueError(
            explain(
                f"Task type {task_type!r} is unknown.",
                expected=f"one of {list(TASK_TYPES)}.",
                fix="correct the type; the oldest scripts' 'master' is 'chief'.",
            )
        )
    if task_type is not None and task_type not in spec.jobs and task_type != "evaluator":
        raise ValueError(
            explain(
                f"Task type {task_type!r} is not in the cluster {spec!r}.",
                expected="this process's own task among the cluster's.",
                fix="add the task's address to the cluster, or correct the task's type.",
            )
        )

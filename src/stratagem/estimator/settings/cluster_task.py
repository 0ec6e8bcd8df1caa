"""What this process is in the cluster that `TF_CONFIG` describes, as an Estimator sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stratagem.cluster import ClusterSpec, TFConfigClusterResolver, check_cluster, is_chief
from stratagem.cluster.resolvers.tf_config import tf_config
from stratagem.cluster.roles import task_count
from stratagem.messages import explain

__all__ = ["ClusterTask", "cluster_task", "model_dir_of_task"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterTask:
    """A task and its training cluster.

    Args:
        cluster_spec: the cluster; an empty one for a process by itself, and for the evaluator.
        task_type: "chief", "worker", "ps" or "evaluator".
        task_id: its index among those of its type.
        master: its address; "" for a process by itself.
        evaluation_master: the address that evaluation connects to; "" unless it is asked for.
        num_ps_replicas: how many parameter servers there are.
        num_worker_replicas: how many tasks train, the chief included; 0 for the evaluator.
        is_chief: whether this is the task that writes.
        global_id_in_cluster: its number among all tasks: the chief first, servers last; None for
            the evaluator.
        service: what stands under `service` in the variable.
    """

    cluster_spec: ClusterSpec
    task_type: str
    task_id: int
    master: str
    evaluation_master: str
    num_ps_replicas: int
    num_worker_replicas: int
    is_chief: bool
    global_id_in_cluster: int | None
    service: Mapping[str, Any] | None


def cluster_task(*, needs_chief: bool) -> ClusterTask:
    """Reads this process's task from `TF_CONFIG`.

    Args:
        needs_chief: whether a cluster has to have a chief; otherwise worker 0 plays it.

    Returns:
        The task; without the variable worker 0, by itself.

    Raises:
        TypeError: `service` is no object.
        ValueError: a cluster without a chief where one is needed; a task without type or index, or
            that is not in the cluster; a task without a cluster that is not worker 0.

    Source: tensorflow/estimator run_config.py, _init_distributed_setting_from_environment_var.
    """
    resolver = TFConfigClusterResolver()
    spec, task_type, task_id = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    if not spec:
        return _task_alone(task_type, task_id)
    if needs_chief and not task_count(spec, "chief"):
        raise ValueError(
            explain(
                f"TF_CONFIG has a cluster without a chief: {spec!r}.",
                expected='one task in the job "chief", where no strategy is asked for.',
                fix='rename worker 0 to "chief", or pass RunConfig(train_distribute=strategy).',
            )
        )
    if task_type is None or task_id is None:
        raise ValueError(
            explain(
                f"TF_CONFIG has a cluster, and a task with type {task_type!r} and index "
                f"{task_id!r}.",
                expected="both of them, where there is a cluster.",
                fix='add "task": {"type": "worker", "index": 0}, for example.',
            )
        )
    check_cluster(spec, task_type, task_id)
    if task_type == "evaluator":
        return _evaluator(task_id)
    return ClusterTask(
        cluster_spec=spec,
        task_type=task_type,
        task_id=task_id,
        master=resolver.master(rpc_layer=resolver.rpc_layer or "grpc"),
        evaluation_master="",
        num_ps_replicas=task_count(spec, "ps"),
        num_worker_replicas=task_count(spec, "chief") + task_count(spec, "worker"),
        is_chief=is_chief(spec, task_type, task_id),
        global_id_in_cluster=_global_id(spec, task_type, task_id),
        service=_service(),
    )


def model_dir_of_task(model_dir: str | None) -> str | None:
    """Returns the model's folder: the argument, or what `TF_CONFIG` says.

    Args:
        model_dir: the argument.

    Returns:
        The folder; None if neither names one.

    Raises:
        ValueError: both do, and differ; or one is empty.

    Source: tensorflow/estimator run_config.py, _get_model_dir.
    """
    from_variable = tf_config().get("model_dir")
    for folder in (model_dir, from_variable):
        if folder == "":
            raise ValueError(
                explain(
                    "model_dir is the empty string.",
                    expected="the path of a folder, in RunConfig and in TF_CONFIG.",
                    fix="leave it out: the Estimator then makes a temporary folder.",
                )
            )
    if model_dir and from_variable and model_dir != from_variable:
        raise ValueError(
            explain(
                f"model_dir is {model_dir!r} in RunConfig and {from_variable!r} in TF_CONFIG.",
                expected="the same folder in both.",
                fix="leave it out in one of them.",
            )
        )
    return model_dir or from_variable


def _task_alone(task_type: str | None, task_id: int | None) -> ClusterTask:
    if (task_type or "worker", task_id or 0) != ("worker", 0):
        raise ValueError(
            explain(
                f"TF_CONFIG has no cluster, and the task {task_type!r} with index {task_id!r}.",
                expected="worker 0, or no task, where there is no cluster.",
                fix='add "cluster" to TF_CONFIG, or leave "task" out.',
            )
        )
    return ClusterTask(
        cluster_spec=ClusterSpec({}),
        task_type="worker",
        task_id=0,
        master=str(tf_config().get("session_master", "")),
        evaluation_master=_evaluation_master(),
        num_ps_replicas=0,
        num_worker_replicas=1,
        is_chief=True,
        global_id_in_cluster=0,
        service=_service(),
    )


def _evaluator(task_id: int) -> ClusterTask:
    """The evaluator is no part of the cluster that trains."""
    return ClusterTask(
        cluster_spec=ClusterSpec({}),
        task_type="evaluator",
        task_id=task_id,
        master="",
        evaluation_master=_evaluation_master(),
        num_ps_replicas=0,
        num_worker_replicas=0,
        is_chief=False,
        global_id_in_cluster=None,
        service=_service(),
    )


def _evaluation_master() -> str:
    return str(tf_config().get("eval_session_master", ""))


def _global_id(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    """The chief is 0, the servers come last, and those between in the order of their names."""
    order = {"chief": 0, "ps": 2}
    before = [
        job for job in spec.jobs if (order.get(job, 1), job) < (order.get(task_type, 1), task_type)
    ]
    return sum(map(spec.num_tasks, before)) + task_id


def _service() -> Mapping[str, Any] | None:
    service = tf_config().get("service")
    if service is not None and not isinstance(service, dict):
        raise TypeError(
            explain(
                f"TF_CONFIG, part 'service', is {service!r}, a {type(service).__name__}.",
                expected="an object.",
                fix="leave it out: nothing here reads it.",
            )
        )
    return service

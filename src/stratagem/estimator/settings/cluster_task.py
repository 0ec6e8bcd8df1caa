"""Task of this process in the `TF_CONFIG` cluster, as an Estimator uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from stratagem.cluster.checks import check_cluster
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver, tf_config
from stratagem.cluster.roles import is_chief, task_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterTask:
    """Cluster task and its training cluster; `global_id_in_cluster` is None for an evaluator."""

    cluster_spec: ClusterSpec = dataclasses.field(default_factory=lambda: ClusterSpec({}))
    task_type: str
    task_id: int
    master: str = ""
    evaluation_master: str = ""
    num_ps_replicas: int = 0
    num_worker_replicas: int = 0
    is_chief: bool = False
    global_id_in_cluster: int | None = None
    service: Mapping[str, Any] | None


def cluster_task(*, needs_chief: bool) -> ClusterTask:
    """Reads this process's task from `TF_CONFIG`, as TensorFlow's run_config.py does."""
    resolver = TFConfigClusterResolver()
    spec, task_type, task_id = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    if not spec:
        return _task_alone(task_type, task_id)
    if needs_chief and not task_count(spec, "chief"):
        raise ValueError(
            explain(
                f"TF_CONFIG describes a cluster without a chief: {spec!r}.",
                expected='one task in the job "chief", because no strategy is set.',
                fix='rename worker 0 to "chief", or pass RunConfig(train_distribute=strategy).',
                code="SG902",
            )
        )
    if task_type is None or task_id is None:
        raise ValueError(
            explain(
                f"TF_CONFIG describes a cluster, but its task has type {task_type!r} and index "
                f"{task_id!r}.",
                expected="a task type and index for this process.",
                fix='add "task": {"type": "worker", "index": 0}, for example.',
            )
        )
    check_cluster(spec, task_type, task_id)
    if task_type == "evaluator":
        # Not part of the training cluster.
        return ClusterTask(
            task_type=task_type,
            task_id=task_id,
            evaluation_master=_evaluation_master(),
            service=_service(),
        )
    return ClusterTask(
        cluster_spec=spec,
        task_type=task_type,
        task_id=task_id,
        master=resolver.master(rpc_layer=resolver.rpc_layer or "grpc"),
        num_ps_replicas=task_count(spec, "ps"),
        num_worker_replicas=task_count(spec, "chief") + task_count(spec, "worker"),
        is_chief=is_chief(spec, task_type, task_id),
        global_id_in_cluster=_global_id(spec, task_type, task_id),
        service=_service(),
    )


def model_dir_of_task(model_dir: str | None) -> str | None:
    """Returns the model folder from the argument or `TF_CONFIG`, or None if neither names one."""
    from_variable = tf_config().get("model_dir")
    for folder in (model_dir, from_variable):
        if folder == "":
            raise ValueError(
                explain(
                    "model_dir is the empty string.",
                    expected="the path of a folder in RunConfig or TF_CONFIG.",
                    fix="omit it: the Estimator then creates a temporary folder.",
                )
            )
    if model_dir and from_variable and model_dir != from_variable:
        raise ValueError(
            explain(
                f"model_dir is {model_dir!r} in RunConfig and {from_variable!r} in TF_CONFIG.",
                expected="the same folder in both.",
                fix="remove it from one of them.",
            )
        )
    return model_dir or from_variable


def _task_alone(task_type: str | None, task_id: int | None) -> ClusterTask:
    if (task_type or "worker", task_id or 0) != ("worker", 0):
        raise ValueError(
            explain(
                f"TF_CONFIG has task type {task_type!r} and index {task_id!r} but no cluster.",
                expected="worker 0 or no task when there is no cluster.",
                fix='add "cluster" to TF_CONFIG, or remove "task".',
            )
        )
    return ClusterTask(
        task_type="worker",
        task_id=0,
        master=str(tf_config().get("session_master", "")),
        evaluation_master=_evaluation_master(),
        num_worker_replicas=1,
        is_chief=True,
        global_id_in_cluster=0,
        service=_service(),
    )


def _evaluation_master() -> str:
    return str(tf_config().get("eval_session_master", ""))


def _global_id(spec: ClusterSpec, task_type: str, task_id: int) -> int:
    """Numbers tasks with the chief first, parameter servers last, and other jobs by name."""
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
                f"TF_CONFIG['service'] is {service!r} of type {type(service).__name__}.",
                expected="a JSON object.",
                fix="remove it: Stratagem does not use it.",
            )
        )
    return service

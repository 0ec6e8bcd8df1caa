"""Resolver for the environment variable `TF_CONFIG`."""

from __future__ import annotations

import json
from typing import Any

from stratagem import environment as variables
from stratagem.cluster.resolvers.resolver import ClusterResolver, has_one_task, master_url
from stratagem.cluster.spec import ClusterSpec, parse_task_index
from stratagem.errors import invalid

_FORM = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": '


class TFConfigClusterResolver(ClusterResolver):
    """Reads the cluster and this process's task from the environment variable `TF_CONFIG`.

    The variable is read on each access. Without it there is no cluster and no task.

    Args:
        task_type: overrides the variable's `task.type`.
        task_id: overrides the variable's `task.index`.
        rpc_layer: overrides the variable's `rpc_layer`.
        environment: name of the environment.

    Raises:
        ValueError: the variable is not JSON, a part of it is malformed, or the index is out of
            range.

    Example:
        >>> sg.cluster_resolver.TFConfigClusterResolver(task_type="worker", task_id=0).task_id
        0

    Source: TF 2.21 tfconfig_cluster_resolver.py, TFConfigClusterResolver.
    """

    _is_local = True

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | str | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self.task_type = task_type
        self.task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._check_task(self.cluster_spec())

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster in the variable.

        Returns:
            The cluster; empty if there is none.

        Raises:
            ValueError: the variable is not JSON, or `cluster` is malformed.
        """
        cluster = tf_config().get("cluster", {})
        try:
            return ClusterSpec(cluster)
        except (TypeError, ValueError) as error:
            raise ValueError(f"TF_CONFIG, part 'cluster': {error}") from error

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the variable's `session_master`, or else the address of a task.

        Args:
            task_type: type of the task; None for this process's.
            task_id: index of the task; None for this process's.
            rpc_layer: prefix of the address; None for the resolver's.

        Returns:
            The address; "" for a cluster with at most one task.

        Raises:
            ValueError: the task is not in the cluster.
        """
        session_master = tf_config().get("session_master")
        if session_master is not None:
            return str(session_master)
        spec = self.cluster_spec()
        if has_one_task(spec):
            return ""
        self._check_task(spec)
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            raise invalid(
                "TF_CONFIG has a cluster of several tasks, but no complete task: "
                f"{(task_type, task_id)}.",
                expected="type and index of this process's task.",
                fix='add "task": {"type": "worker", "index": 0}, or pass both.',
                code="SG501",
            )
        return master_url(
            spec.task_address(task_type, task_id),
            self.rpc_layer if rpc_layer is None else rpc_layer,
        )

    def _find_task(self) -> tuple[str | None, int | None]:
        return _task()

    def _find_rpc_layer(self) -> str | None:
        return tf_config().get("rpc_layer")

    def _check_task(self, spec: ClusterSpec) -> None:
        """Checks a known index against its job; `check_cluster` checks the rest."""
        task_type, task_id = self.task_type, self.task_id
        if task_type in spec.jobs and task_id is not None:
            indices = spec.task_indices(str(task_type))
            if task_id not in indices:
                raise invalid(
                    f"TF_CONFIG, part 'task': index {task_id} is outside the job {task_type!r}.",
                    expected=f"one of {indices}.",
                    fix="number tasks from 0, or add the task's address to the cluster.",
                    code="SG502",
                )


def tf_config() -> dict[str, Any]:
    """Returns the parsed `TF_CONFIG`, or {} if it is not set."""
    text = variables.lookup("TF_CONFIG")
    if text is None:
        return {}
    try:
        config = json.loads(text)
    except ValueError as error:
        raise invalid(
            f"TF_CONFIG is not JSON: {error}: {text!r}.",
            expected=f"{_FORM}0}}}}.",
            fix="write it with json.dumps, and quote it in the shell.",
            code="SG501",
        ) from error
    if not isinstance(config, dict):
        raise invalid(
            f"TF_CONFIG is a {type(config).__name__}: {text!r}.",
            expected=f"an object: {_FORM}0}}}}.",
            fix="put the cluster under the key 'cluster' and the task under 'task'.",
            code="SG501",
        )
    return config


def _task() -> tuple[str | None, int | None]:
    """Returns the type and the index in the variable."""
    config = tf_config()
    if "task" not in config:
        return None, None
    task = config["task"]
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise invalid(
            f"TF_CONFIG, part 'task': {task!r} has no type.",
            expected='{"type": "worker", "index": 0}.',
            fix="add the type of this process's task.",
            code="SG501",
        )
    try:
        index = parse_task_index(task["index"]) if "index" in task else None
    except (TypeError, ValueError) as error:
        raise ValueError(f"TF_CONFIG, part 'task': {error}") from error
    return task["type"], index

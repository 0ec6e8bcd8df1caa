"""Resolvers for JSON in environment variables: `TF_CONFIG`, and Amazon SageMaker's hosts."""

from __future__ import annotations

import json
from typing import Any

from stratagem import environment as variables
from stratagem.cluster.resolvers.resolver import ClusterResolver, has_one_task, master_url
from stratagem.cluster.spec import ClusterSpec, parse_task_index
from stratagem.errors import explain, invalid

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


# Hosts of an Amazon SageMaker training job.


class SageMakerClusterResolver(ClusterResolver):
    """Reads the hosts from SageMaker's variables; each is a worker, sorted by name.

    Args:
        port: port of every worker.
        task_type: overrides "worker".
        task_id: overrides the position of `SM_CURRENT_HOST`.
        rpc_layer: prefix of addresses.
        environment: name of the environment.

    Raises:
        RuntimeError: outside SageMaker.
        ValueError: `SM_HOSTS` is not a list of hosts, or does not contain this host.

    Example:
        >>> from unittest import mock
        >>> job = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
        >>> with mock.patch.dict("os.environ", job):  # SageMaker sets them
        ...     resolver = sg.cluster_resolver.SageMakerClusterResolver()
        >>> resolver.cluster_spec(), resolver.task_id
        (ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}), 1)

    Source: TF 2.21 sagemaker_cluster_resolver.py, SageMakerClusterResolver.
    """

    _is_local = True

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | str | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._port = port
        self._hosts, index = _hosts()
        self._task_type = "worker" if task_type is None else task_type
        self._task_id = index if task_id is None else parse_task_index(task_id)
        self._rpc_layer = rpc_layer
        self._environment = environment

    def cluster_spec(self) -> ClusterSpec:
        """Returns the workers.

        Returns:
            The cluster.
        """
        return ClusterSpec({"worker": [f"{host}:{self._port}" for host in self._hosts]})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a worker.

        Args:
            task_type: type of the task; None for this process's.
            task_id: index of the task; None for this process's.
            rpc_layer: prefix of the address; None for the resolver's.

        Returns:
            The address; "" if this host is the only one.

        Raises:
            ValueError: the task is not in the cluster.
        """
        if has_one_task(self.cluster_spec()):
            return ""
        return super().master(task_type, task_id, rpc_layer)


def _hosts() -> tuple[list[str], int]:
    """Returns all hosts, sorted, and the index of this one."""
    text, current = variables.lookup("SM_HOSTS"), variables.lookup("SM_CURRENT_HOST")
    if text is None or current is None:
        raise RuntimeError(
            explain(
                f"Not a SageMaker environment: SM_HOSTS={text!r}, SM_CURRENT_HOST={current!r}.",
                expected="both variables, as SageMaker sets them in a training job.",
                fix="run the script as a training job, or use another resolver.",
            )
        )
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) for host in hosts):
        raise invalid(
            f"SM_HOSTS={text!r} is not a list of hosts.",
            expected='a JSON list such as ["algo-1", "algo-2"].',
            fix="keep the variable as SageMaker sets it.",
        )
    hosts = sorted(hosts)
    if current not in hosts:
        raise invalid(
            f"SM_CURRENT_HOST={current!r} is not among SM_HOSTS={hosts}.",
            expected="the name of this host in the list.",
            fix="keep the variables as SageMaker sets them.",
        )
    return hosts, hosts.index(current)

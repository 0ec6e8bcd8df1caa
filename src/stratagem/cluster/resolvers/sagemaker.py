"""Resolver for the hosts of an Amazon SageMaker training job."""

from __future__ import annotations

import json

from stratagem import environment as variables
from stratagem.cluster.resolvers.resolver import ClusterResolver, has_one_task
from stratagem.cluster.spec import ClusterSpec, parse_task_index
from stratagem.errors import explain, invalid


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

"""Clusters on Kubernetes: pods selected by labels, and tasks with load balancers."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from stratagem.cluster.addresses import join_address
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.roles import TASK_TYPES
from stratagem.cluster.spec import ClusterSpec, parse_task_index
from stratagem.environment import load
from stratagem.errors import explain, invalid


class KubernetesExecutableLocation(enum.Enum):
    """Location of this process: in a pod of the cluster, or outside.

    Example:
        >>> [location.name for location in sg.cluster_resolver.KubernetesExecutableLocation]
        ['WITHIN_CLUSTER', 'OFF_CLUSTER']

    Source: TF 2.21 kubernetes_cluster_resolver.py, ExecutableLocation.
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """Lists the pods with the labels of each job.

    It cannot find out which of them is this process: set `task_type` and `task_id`.

    Args:
        job_to_label_mapping: label selectors of each job's pods; None for `{"worker":
            ["job-name=tensorflow"]}`.
        tf_server_port: port of every task.
        rpc_layer: prefix of addresses.
        override_client: a `kubernetes.client.CoreV1Api` with credentials.
        executable_location: source of the credentials without a client.

    Raises:
        ImportError: no client is passed, and the package `kubernetes` is not installed.
        ValueError: an unknown location.

    Example:
        >>> from types import SimpleNamespace as Namespace
        >>> class Client:  # in place of kubernetes.client.CoreV1Api()
        ...     def list_pod_for_all_namespaces(self, label_selector):
        ...         pod = Namespace(metadata=Namespace(name="pod-0"),
        ...                         status=Namespace(phase="Running", pod_ip="10.0.0.2"))
        ...         return Namespace(items=[pod])
        >>> resolver = sg.cluster_resolver.KubernetesClusterResolver(
        ...     {"worker": ["job-name=train"]}, override_client=Client())
        >>> resolver.task_type, resolver.task_id = "worker", 0
        >>> resolver.cluster_spec(), resolver.master()
        (ClusterSpec({'worker': ['10.0.0.2:8470']}), 'grpc://10.0.0.2:8470')

    Source: TF 2.21 kubernetes_cluster_resolver.py, KubernetesClusterResolver.
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Iterable[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
    ) -> None:
        if not isinstance(executable_location, KubernetesExecutableLocation):
            raise invalid(
                f"executable_location={executable_location!r} is unknown.",
                expected="KubernetesExecutableLocation.WITHIN_CLUSTER or OFF_CLUSTER.",
                fix="pass one of sg.cluster_resolver.KubernetesExecutableLocation.",
            )
        self._selectors = {
            job: list(selectors)
            for job, selectors in (
                job_to_label_mapping or {"worker": ["job-name=tensorflow"]}
            ).items()
        }
        self._port = tf_server_port
        self._rpc_layer = rpc_layer
        self._client = override_client or core_api(
            executable_location, needed_by="KubernetesClusterResolver"
        )

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of the pods, from a request to Kubernetes.

        Pods of one selector are sorted by name, with numbers in names compared by value.

        Returns:
            The cluster.

        Raises:
            RuntimeError: a pod is not running, or no pod has the labels.
        """
        jobs: dict[str, list[str]] = {}
        for job, selectors in self._selectors.items():
            jobs[job] = [
                join_address(_address(pod), self._port)
                for selector in selectors
                for pod in self._pods(selector)
            ]
        return ClusterSpec(jobs)

    def _pods(self, selector: str) -> list[Any]:
        pods = self._client.list_pod_for_all_namespaces(label_selector=selector).items
        if not pods:
            raise RuntimeError(
                explain(
                    f"No pod has the labels {selector!r}.",
                    expected="the pods of the cluster.",
                    fix="correct job_to_label_mapping, or start the pods first.",
                )
            )
        return sorted(pods, key=lambda pod: _numbers_by_value(pod.metadata.name))


def core_api(location: KubernetesExecutableLocation, *, needed_by: str) -> Any:
    """Returns a `kubernetes.client.CoreV1Api`, if the package `kubernetes` is installed."""
    needed = {"needed_by": needed_by, "install": "'stratagem[clusters]'"}
    config = load("kubernetes.config", **needed)
    if location is KubernetesExecutableLocation.OFF_CLUSTER:
        config.load_kube_config()
    else:
        config.load_incluster_config()
    return load("kubernetes.client", **needed).CoreV1Api()


def _address(pod: Any) -> str:
    if pod.status.phase != "Running" or not pod.status.pod_ip:
        raise RuntimeError(
            explain(
                f"Pod {pod.metadata.name!r} is not running; phase: {pod.status.phase!r}, address: "
                f"{pod.status.pod_ip!r}.",
                expected="every pod of the cluster to be running.",
                fix="wait for it, check `kubectl describe pod`, or delete it if it is outdated.",
            )
        )
    return pod.status.pod_ip


def _numbers_by_value(name: str) -> list[tuple[str, int]]:
    """Sorts `worker-2` before `worker-10`, in the order of completion indices."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


# Clusters whose tasks have load balancers, for clients outside.


def parse_task_name(name: str) -> tuple[str | None, int | None]:
    """Parses type and index of a task from its Service's name, `<name>-<type>-<index>`.

    Returns (None, None) for other Services, without a task type before the last dash. Raises
    ValueError for a task type without a name before it or an index after it.

    Example:
        >>> from stratagem.cluster.resolvers.kubernetes import parse_task_name
        >>> parse_task_name("train-worker-3"), parse_task_name("kubernetes")
        (('worker', 3), (None, None))

    Source: tensorflow/ecosystem, keras_model_to_estimator_client.py, _parse_task_name_fn.
    """
    cluster, _, task = name.rpartition("-")
    cluster, _, task_type = cluster.rpartition("-")
    if task_type not in TASK_TYPES:
        return None, None
    try:
        index = parse_task_index(task)
    except ValueError:
        index = None
    if not cluster or index is None:
        raise invalid(
            f"Service {name!r} has a task type in its name, but no valid task.",
            expected="<name>-<type>-<index>, such as train-worker-0.",
            fix="rename the Service, or pass a parse_task_name_fn that handles it.",
        )
    return task_type, index


def resolve_cluster(
    port: int = 5000,
    parse_task_name_fn: Callable[[str], tuple[str | None, int | None]] = parse_task_name,
    *,
    override_client: Any = None,
    executable_location: KubernetesExecutableLocation = KubernetesExecutableLocation.OFF_CLUSTER,
) -> ClusterSpec:
    """Returns the cluster whose tasks have load balancers on Kubernetes.

    `stratagem kubernetes render --set expose_tasks=true` creates one for each task.

    Args:
        port: port of every task.
        parse_task_name_fn: returns a Service's task type and index, or (None, None) for other
            Services.
        override_client: a `kubernetes.client.CoreV1Api` with credentials.
        executable_location: source of the credentials without a client.

    Returns:
        The cluster, with the addresses of the load balancers.

    Raises:
        ImportError: no client is passed, and the package `kubernetes` is not installed.
        ValueError: there are no tasks, one is missing or has no address yet, two Services belong to
            one task, or a name cannot be parsed.

    Example:
        >>> from types import SimpleNamespace as Namespace
        >>> def service(name, ip):
        ...     balancer = Namespace(ingress=[Namespace(ip=ip, hostname=None)])
        ...     return Namespace(metadata=Namespace(name=name), spec=Namespace(type="LoadBalancer"),
        ...                      status=Namespace(load_balancer=balancer))
        >>> class Client:  # in place of kubernetes.client.CoreV1Api()
        ...     def list_service_for_all_namespaces(self):
        ...         return Namespace(items=[service("a-worker-0", "10.0.0.7"),
        ...                                 service("a-worker-1", "10.0.0.9")])
        >>> sg.cluster.resolve_cluster(override_client=Client())
        ClusterSpec({'worker': ['10.0.0.7:5000', '10.0.0.9:5000']})

    Source: tensorflow/ecosystem, keras_model_to_estimator_client.py, resolve_cluster.
    """
    client = override_client or core_api(executable_location, needed_by="resolve_cluster")
    services = client.list_service_for_all_namespaces().items
    found = _services_by_task(services, parse_task_name_fn)
    jobs: dict[str, list[str]] = {}
    for (task_type, _), service in sorted(found.items(), key=lambda item: item[0]):
        jobs.setdefault(task_type, []).append(join_address(_balancer_address(service), port))
    return ClusterSpec(jobs)


def _services_by_task(
    services: list[Any], parse_task_name_fn: Callable[[str], tuple[str | None, int | None]]
) -> dict[tuple[str, int], Any]:
    found: dict[tuple[str, int], Any] = {}
    others: list[str] = []
    for service in services:
        name = service.metadata.name
        if not (_ingresses(service) or service.spec.type == "LoadBalancer"):
            continue
        task_type, index = parse_task_name_fn(name)
        if task_type is None or index is None:
            others.append(name)
            continue
        task = (task_type, parse_task_index(index))
        if task in found:
            raise invalid(
                f"Services {found[task].metadata.name!r} and {name!r} are both for "
                f"{task_type} {index}.",
                expected="one Service per task, and tasks of one cluster.",
                fix="pass a parse_task_name_fn that returns (None, None) for other clusters.",
            )
        found[task] = service
    _check_complete(found, others)
    return found


def _check_complete(found: dict[tuple[str, int], Any], others: list[str]) -> None:
    if not found:
        raise invalid(
            f"No load balancer belongs to a task; the others are {others}.",
            expected="one named <name>-<type>-<index> for each task.",
            fix="wait until the cluster is ready, or render it with expose_tasks.",
        )
    for task_type in {task_type for task_type, _ in found}:
        count = 1 + max(index for other, index in found if other == task_type)
        missing = [index for index in range(count) if (task_type, index) not in found]
        if missing:
            raise invalid(
                f"Load balancers are missing: {task_type} {missing} of {count} or more.",
                expected=f"a load balancer for each {task_type}.",
                fix="wait until the cluster is ready, or start the missing tasks.",
            )


def _ingresses(service: Any) -> list[Any]:
    balancer = service.status.load_balancer
    return list((balancer and balancer.ingress) or [])


def _balancer_address(service: Any) -> str:
    for ingress in _ingresses(service):
        if ingress.ip or ingress.hostname:
            return ingress.ip or ingress.hostname
    raise invalid(
        f"Service {service.metadata.name!r} has no address yet.",
        expected="a load balancer that the cluster's provider has finished setting up.",
        fix="wait for it with `kubectl get services --watch`.",
    )

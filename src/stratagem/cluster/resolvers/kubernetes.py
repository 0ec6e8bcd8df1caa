"""Resolver for pods on Kubernetes, selected by labels."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from typing import Any

from stratagem.cluster.addresses import join_address
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec
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

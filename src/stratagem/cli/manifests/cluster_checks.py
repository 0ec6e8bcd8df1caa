"""Consistency checks of `TF_CONFIG` against the pods and Services of a manifest."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from stratagem.cli.manifests.documents import Problem
from stratagem.cli.manifests.pods import Container, Pod, pods_of, services_of
from stratagem.cli.manifests.rendering import MAX_VARIABLE_BYTES

_Cluster = dict[str, dict[int, str]]


def cluster_problems(documents: list[dict[str, Any]]) -> list[Problem]:
    """Compares `TF_CONFIG` of every pod with the pods and Services of valid documents."""
    pods = list(pods_of(documents))
    services = services_of(documents)
    problems: dict[Problem, None] = {}
    clusters: dict[str, tuple[Pod, _Cluster]] = {}
    tasks: Counter[tuple[str, int]] = Counter()
    for pod in pods:
        for container in pod.containers:
            text = container.environment.get("TF_CONFIG")
            if text is None:
                continue
            try:
                cluster, task = _parse_tf_config(text)
            except ValueError as error:
                problems[Problem(pod.owner, _location(pod), str(error))] = None
                continue
            tasks[task] += 1
            clusters.setdefault(json.dumps(cluster, sort_keys=True), (pod, cluster))
            for message in _address_problems(pod, container, cluster, task, services):
                problems[Problem(pod.owner, _location(pod), message)] = None
    problems |= dict.fromkeys(
        _cluster_wide_problems(list(clusters.values()), tasks, pods, services)
    )
    return list(problems)


def _location(pod: Pod) -> str:
    return f"pod {pod.name}: TF_CONFIG" if pod.name else "TF_CONFIG"


def _parse_tf_config(text: str) -> tuple[_Cluster, tuple[str, int]]:
    """Parses a `TF_CONFIG` into its cluster and its task."""
    num_bytes = len(f"TF_CONFIG={text}\0".encode())
    if num_bytes > MAX_VARIABLE_BYTES:
        raise ValueError(f"{num_bytes} bytes, but Linux allows at most {MAX_VARIABLE_BYTES}")
    try:
        config = json.loads(text)
        cluster = {job: _addresses(tasks) for job, tasks in config["cluster"].items()}
        task = str(config["task"]["type"]), int(config["task"]["index"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"not JSON with a cluster and a task ({type(error).__name__}: {error}): {text[:200]}"
        ) from error
    if task[1] not in cluster.get(task[0], {}):
        raise ValueError(f"task {task[0]} {task[1]} is not in the cluster")
    return cluster, task


def _addresses(tasks: dict[Any, Any] | list[Any]) -> dict[int, str]:
    pairs = tasks.items() if isinstance(tasks, dict) else enumerate(tasks)
    return {int(index): str(address) for index, address in pairs}


def _address_problems(
    pod: Pod,
    container: Container,
    cluster: _Cluster,
    task: tuple[str, int],
    services: dict[Any, dict[str, Any]],
) -> Iterator[str]:
    """Yields problems with the address of the pod's task."""
    address = cluster[task[0]][task[1]]
    host, _, port = address.rpartition(":")
    if container.ports and port not in map(str, container.ports):
        ports = ", ".join(map(str, sorted(container.ports)))
        yield f"the port of its address {address!r} is not a container port ({ports})"
    service, name = _service_and_pod(host, services)
    if name is not None:
        if pod.name and (name, service) != (pod.name, pod.domain):
            yield f"its address {address!r} does not match the pod {pod.name}.{pod.domain}"
    elif service in services and not _selects(services[service], pod):
        yield f"its address {address!r} is a Service that does not select the pod"


def _cluster_wide_problems(
    clusters: list[tuple[Pod, _Cluster]],
    tasks: Counter[tuple[str, int]],
    pods: list[Pod],
    services: dict[Any, dict[str, Any]],
) -> Iterator[Problem]:
    """Yields problems with the addresses, each checked once, and with the set of tasks."""
    for pod, cluster in clusters:
        for job, addresses in cluster.items():
            for index, address in addresses.items():
                message = _unreachable_reason(address, pods, services)
                if message:
                    yield Problem(pod.owner, "TF_CONFIG", f"{job} {index}: {message}")
                if not tasks[job, index]:
                    yield Problem(pod.owner, "TF_CONFIG", f"{job} {index}: no pod runs this task")
    for (job, index), count in tasks.items():
        if count > 1:
            yield Problem("TF_CONFIG", "", f"{count} pods run the same task, {job} {index}")
    for pod, _ in clusters[1:]:
        first = clusters[0][0].owner
        yield Problem(pod.owner, "TF_CONFIG", f"its cluster differs from that of {first}")


def _unreachable_reason(address: str, pods: list[Pod], services: dict[Any, dict[str, Any]]) -> str:
    """Returns why an address is unreachable, or "" if it may be reachable."""
    service, name = _service_and_pod(address.rpartition(":")[0], services)
    if service is None:
        return ""
    if service not in services:
        return f"{address!r}: no Service is named {service!r}"
    if name is None:
        return ""
    named = [pod for pod in pods if (pod.name, pod.domain) == (name, service)]
    if not named:
        return f"{address!r}: no pod of Service {service!r} is named {name!r}"
    if not any(_selects(services[service], pod) for pod in named):
        return f"{address!r}: Service {service!r} does not select the pod"
    return ""


def _service_and_pod(
    host: str, services: dict[Any, dict[str, Any]]
) -> tuple[str | None, str | None]:
    """Returns the Service of a host name, and the pod in it if any; (None, None) for an IP."""
    if ":" in host or not any(map(str.isalpha, host)):
        return None, None
    first, *rest = host.split(".")
    return (first, None) if first in services or not rest else (rest[0], first)


def _selects(service: dict[str, Any], pod: Pod) -> bool:
    selector = (service.get("spec") or {}).get("selector") or {}
    return bool(selector) and selector.items() <= dict(pod.labels).items()

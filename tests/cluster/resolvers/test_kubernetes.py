"""Pods from a fake Kubernetes client."""

from __future__ import annotations

import sys
import types

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.kubernetes import (
    KubernetesClusterResolver,
    KubernetesExecutableLocation,
)


def _pod(name: str, address: str | None, phase: str = "Running") -> types.SimpleNamespace:
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(name=name),
        status=types.SimpleNamespace(phase=phase, pod_ip=address, host_ip="192.168.0.1"),
    )


class _Client:
    """A fake of CoreV1Api with `list_pod_for_all_namespaces`."""

    def __init__(self, **pods: list[types.SimpleNamespace]) -> None:
        self.pods = {f"job-name={job}": listed for job, listed in pods.items()}

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(items=self.pods.get(label_selector, []))


def test_pods_are_sorted_by_name_selector_by_selector() -> None:
    client = _Client(
        a=[_pod("a-10", "10.0.0.3"), _pod("a-9", "10.0.0.2"), _pod("a-1", "10.0.0.1")],
        b=[_pod("b-0", "fd00::1")],
        ps=[_pod("ps-0", "10.0.0.9")],
    )
    resolver = KubernetesClusterResolver(
        {"worker": ["job-name=a", "job-name=b"], "ps": ["job-name=ps"]},
        tf_server_port=5000,
        override_client=client,
    )
    assert resolver.cluster_spec().as_dict() == {
        "worker": ["10.0.0.1:5000", "10.0.0.2:5000", "10.0.0.3:5000", "[fd00::1]:5000"],
        "ps": ["10.0.0.9:5000"],
    }


def test_defaults_are_tensorflow_s() -> None:
    client = _Client(tensorflow=[_pod("t-0", "10.0.0.1"), _pod("t-1", "10.0.0.2")])
    resolver = KubernetesClusterResolver(override_client=client)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470", "10.0.0.2:8470"]}
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, "grpc")
    assert resolver.master() == ""
    assert resolver.master("worker", 1) == "grpc://10.0.0.2:8470"
    resolver.task_type, resolver.task_id = "worker", 1
    assert resolver.master(rpc_layer="http") == "http://10.0.0.2:8470"
    assert resolver.processes() == Processes(2, 1, "10.0.0.1:8470")
    client.pods["job-name=tensorflow"].pop()
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}


@pytest.mark.parametrize(
    ("pod", "message"),
    [
        (_pod("t-1", "10.0.0.2", "Pending"), "Pod 't-1' is not running; phase: 'Pending'"),
        (_pod("t-1", None), "Pod 't-1' is not running; phase: 'Running', address: None"),
    ],
)
def test_pod_that_is_not_running_is_named(pod, message) -> None:
    client = _Client(tensorflow=[_pod("t-0", "10.0.0.1"), pod])
    with pytest.raises(RuntimeError, match=message):
        KubernetesClusterResolver(override_client=client).cluster_spec()


def test_label_that_no_pod_has_is_named() -> None:
    with pytest.raises(RuntimeError, match="No pod has the labels 'job-name=tensorflow'"):
        KubernetesClusterResolver(override_client=_Client()).cluster_spec()


@pytest.mark.parametrize(
    ("location", "loaded"),
    [
        (KubernetesExecutableLocation.WITHIN_CLUSTER, "load_incluster_config"),
        (KubernetesExecutableLocation.OFF_CLUSTER, "load_kube_config"),
    ],
)
def test_client_is_made_where_the_process_runs(monkeypatch, location, loaded) -> None:
    calls: list[str] = []
    config = types.ModuleType("kubernetes.config")
    for name in ("load_incluster_config", "load_kube_config"):
        config.__dict__[name] = lambda name=name: calls.append(name)
    client = types.ModuleType("kubernetes.client")
    client.__dict__["CoreV1Api"] = lambda: _Client(tensorflow=[_pod("t-0", "10.0.0.1")])
    monkeypatch.setitem(sys.modules, "kubernetes", types.ModuleType("kubernetes"))
    monkeypatch.setitem(sys.modules, "kubernetes.config", config)
    monkeypatch.setitem(sys.modules, "kubernetes.client", client)
    resolver = KubernetesClusterResolver(executable_location=location)
    assert resolver.cluster_spec() == {"worker": ["10.0.0.1:8470"]}
    assert calls == [loaded]


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    with pytest.raises(
        ImportError,
        match=r"KubernetesClusterResolver needs kubernetes.config(?s:.)*'stratagem\[clusters\]'",
    ):
        KubernetesClusterResolver()


def test_other_location_is_refused() -> None:
    assert [location.value for location in KubernetesExecutableLocation] == [0, 1]
    with pytest.raises(
        ValueError, match=r"executable_location=0.(?s:.)*WITHIN_CLUSTER or OFF_CLUS"
    ):
        KubernetesClusterResolver(override_client=_Client(), executable_location=0)

"""Clusters from load balancers of a fake Kubernetes client."""

from __future__ import annotations

import sys
import types

import pytest

from stratagem.cluster.kubernetes_services import parse_task_name, resolve_cluster


def _service(name: str, *addresses: str | None, kind: str = "LoadBalancer") -> object:
    ingress = [
        types.SimpleNamespace(
            ip=address if address and address[0].isdigit() else None,
            hostname=address if address and not address[0].isdigit() else None,
        )
        for address in addresses
    ]
    return types.SimpleNamespace(
        metadata=types.SimpleNamespace(name=name),
        spec=types.SimpleNamespace(type=kind),
        status=types.SimpleNamespace(load_balancer=types.SimpleNamespace(ingress=ingress or None)),
    )


class _Client:
    def __init__(self, *services: object) -> None:
        self.services = services

    def list_service_for_all_namespaces(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(items=list(self.services))


_TASKS = [_service(f"train-worker-{index}", f"10.0.0.{index}") for index in range(11)]
_OTHERS = [
    _service("kubernetes", kind="ClusterIP"),
    _service("train-worker", kind="ClusterIP"),
    _service("nginx", "10.9.9.9"),
    _service("my-own-web-1", "10.9.9.8"),
]


def test_tasks_stand_at_their_index_whatever_the_order() -> None:
    servers = [
        _service("train-ps-0", None, "lb.example.com"),
        _service("a-b-evaluator-0", "1.2.3.4"),
    ]
    client = _Client(*_OTHERS, *reversed(_TASKS), *servers)
    assert resolve_cluster(override_client=client) == {
        "worker": [f"10.0.0.{index}:5000" for index in range(11)],
        "ps": ["lb.example.com:5000"],
        "evaluator": ["1.2.3.4:5000"],
    }
    ports = resolve_cluster(6000, override_client=client).job_tasks("ps")
    assert ports == ["lb.example.com:6000"]


def test_names_of_another_form_are_read_by_a_function() -> None:
    client = _Client(_service("w1", "10.0.0.2"), _service("w0", "10.0.0.1"), *_OTHERS)

    def parse(name: str) -> tuple[str | None, int | None]:
        return ("worker", int(name[1:])) if name[0] == "w" else (None, None)

    spec = resolve_cluster(parse_task_name_fn=parse, override_client=client)
    assert spec == {"worker": ["10.0.0.1:5000", "10.0.0.2:5000"]}


@pytest.mark.parametrize(
    ("services", "message"),
    [
        (
            [],
            r"No load balancer belongs to a task; the others are \[\](?s:.)*<name>-<type>-<index>",
        ),
        (
            _OTHERS,
            r"No load balancer belongs to a task; the others are \['nginx', 'my-own-web-1'\]",
        ),
        (_TASKS[1:], r"Load balancers are missing: worker \[0\] of 11"),
        (
            [*_TASKS[:3], *_TASKS[5:8]],
            r"Load balancers are missing: worker \[3, 4\] of 8(?s:.)*start",
        ),
        ([_service("t-worker-0")], r"Service 't-worker-0' has no address yet(?s:.)*--watch"),
        ([_service("t-worker-0", None)], "Service 't-worker-0' has no address yet"),
        (
            [*_TASKS, _service("other-worker-3", "10.0.1.1")],
            r"Services 'train-worker-3' and 'other-worker-3' are both for worker 3(?s:.)*one cl",
        ),
        (
            [_service("t-worker-x", "10.0.0.1")],
            r"'t-worker-x' has a task type in its name(?s:.)*rename",
        ),
        ([_service("worker-0", "10.0.0.1")], "'worker-0' has a task type in its name"),
    ],
)
def test_cluster_that_is_not_whole_is_refused(services, message) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_cluster(override_client=_Client(*services))


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("dist-strat-example-worker-0", ("worker", 0)),
        ("a-ps-12", ("ps", 12)),
        ("a-chief-0", ("chief", 0)),
        ("a-evaluator-0", ("evaluator", 0)),
        ("a-tensorboard-0", (None, None)),
        ("train-worker", (None, None)),
        ("kubernetes", (None, None)),
        ("", (None, None)),
    ],
)
def test_names_of_services(name, task) -> None:
    assert parse_task_name(name) == task


def test_credentials_are_those_of_the_user(monkeypatch) -> None:
    calls: list[str] = []
    config = types.ModuleType("kubernetes.config")
    config.__dict__["load_kube_config"] = lambda: calls.append("load_kube_config")
    client = types.ModuleType("kubernetes.client")
    client.__dict__["CoreV1Api"] = lambda: _Client(*_TASKS[:1])
    monkeypatch.setitem(sys.modules, "kubernetes", types.ModuleType("kubernetes"))
    monkeypatch.setitem(sys.modules, "kubernetes.config", config)
    monkeypatch.setitem(sys.modules, "kubernetes.client", client)
    assert resolve_cluster() == {"worker": ["10.0.0.0:5000"]}
    assert calls == ["load_kube_config"]


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    monkeypatch.setitem(sys.modules, "kubernetes.config", None)
    with pytest.raises(ImportError, match=r"resolve_cluster needs kubernetes.config"):
        resolve_cluster()

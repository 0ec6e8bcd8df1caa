"""Valid documents whose tasks would not find each other."""

from __future__ import annotations

import re

import pytest

from stratagem.cli.manifests.kubernetes import render_kubernetes, validate_kubernetes

_MANIFESTS = render_kubernetes({"name": "t", "ps_replicas": 1, "has_eval": True})
_WORKER = "Job/t-worker: "
_ADDRESS = "'t-worker-1.t-worker:5000'"


def _problems(*changes: tuple[str, str], count: int = 1) -> list[str]:
    manifests = _MANIFESTS
    for pattern, replacement in changes:
        manifests, found = re.subn(pattern, replacement, manifests, count=count)
        assert found, f"{pattern!r} is not in the manifests"
    return [str(problem) for problem in validate_kubernetes(manifests)]


def test_rendered_manifests_have_no_problem() -> None:
    assert validate_kubernetes(_MANIFESTS) == []


@pytest.mark.parametrize(
    ("pattern", "replacement", "problem"),
    [
        (
            "completions: 2",
            "completions: 3",
            "pod t-worker-2: TF_CONFIG: task worker 2 is not in the",
        ),
        ("completions: 2", "completions: 1", "TF_CONFIG: worker 1: no pod runs this task"),
        (
            "completions: 2",
            "completions: 1",
            f"{_ADDRESS}: no pod of Service 't-worker' is named 't-wor",
        ),
        (
            "containerPort: 5000",
            "containerPort: 5001",
            f"the port of its address {_ADDRESS} is not a container port (5001)",
        ),
        (
            "subdomain: t-worker",
            "subdomain: t-ps",
            f"its address {_ADDRESS} does not match the pod t-worker-1.t-ps",
        ),
        (
            r"name: t-worker\n  labels",
            "name: other\n  labels",
            f"worker 1: {_ADDRESS}: no Service is named 't-worker'",
        ),
        (
            "component: worker\n  ports",
            "component: walker\n  ports",
            f"worker 1: {_ADDRESS}: Service 't-worker' does not select the pod",
        ),
        (
            r"JOB_COMPLETION_INDEX\)",
            "INDEX)",
            "pod t-worker-1: TF_CONFIG: not JSON with a cluster and a task",
        ),
        (r'\\"type\\"', r'\\"typ\\"', "(KeyError: 'type')"),
        (
            r'\\"worker\\", \\"index',
            r'\\"chief\\", \\"index',
            "task chief 1 is not in the cluster",
        ),
        (r'"{\\"cluster', r'"3{\\"cluster', "JSONDecodeError"),
        (r'value: "{\\"cluster.*"', 'value: "[]"', "(TypeError: "),
    ],
)
def test_mistake_is_reported_with_its_place(pattern, replacement, problem) -> None:
    found = _problems((pattern, replacement))
    assert any(problem in line for line in found), found
    assert any(line.startswith(_WORKER) for line in found)


def test_clusters_that_differ_are_reported() -> None:
    found = _problems(("t-worker-0.t-worker:5000", "t-worker-0.t-worker:5001"))
    assert "StatefulSet/t-ps: TF_CONFIG: its cluster differs from that of Job/t-worker" in found


def test_task_of_two_pods_is_reported() -> None:
    found = _problems((r'\\"evaluator\\", \\"index\\": ', r'\\"ps\\", \\"index\\": '), count=1)
    assert "TF_CONFIG: 2 pods run the same task, ps 0" in found
    assert any(line.endswith("evaluator 0: no pod runs this task") for line in found)


def test_variable_too_long_for_a_process_is_reported() -> None:
    long = "x" * (128 * 1024)
    found = _problems((r'(value: "{\\"cluster\\": {)', rf'\1\\"{long}\\": [], '))
    assert any("bytes, but Linux allows at most 131072" in line for line in found)


def test_each_problem_is_reported_once() -> None:
    found = _problems((r"name: t-worker\n  labels", "name: other\n  labels"))
    assert len(found) == len(set(found))


@pytest.mark.parametrize(
    ("addresses", "problems"),
    [
        (["10.0.0.1:5000", "10.0.0.2:5000"], []),
        (["[fd00::1]:5000", "[fd00::2]:5000"], []),
        (["a:5000", "a.default.svc:5000"], []),
        (["a:5000", "b:5000"], ["'b:5000': no Service is named 'b'"]),
        (["c:5000", "a:5000"], ["is a Service that does not select the pod"]),
    ],
)
def test_addresses_of_other_kinds(addresses, problems) -> None:
    hosts = ", ".join(f'"{address}"' for address in addresses)
    config = f'{{"cluster": {{"worker": [{hosts}]}}, "task": {{"type": "worker", "index": "0"}}}}'
    other = config.replace('"0"', '"1"')
    manifests = "".join(
        f"""
---
apiVersion: v1
kind: Pod
metadata: {{name: p{index}, labels: {{app: x}}}}
spec: {{containers: [{{name: c, image: i, env: [{{name: TF_CONFIG, value: '{text}'}}]}}]}}
---
apiVersion: v1
kind: Service
metadata: {{name: {service}}}
spec: {{selector: {{app: {selected}}}, ports: [{{port: 5000}}]}}
"""
        for index, text, service, selected in ((0, config, "a", "x"), (1, other, "c", "y"))
    )
    found = [problem.message for problem in validate_kubernetes(manifests)]
    assert len(found) == len(problems)
    for message, wanted in zip(found, problems, strict=True):
        assert wanted in message


def test_pods_without_tf_config_are_fine() -> None:
    plain = re.sub(r"name: TF_CONFIG", "name: OTHER", _MANIFESTS)
    assert validate_kubernetes(plain) == []

"""Pods of every rendered form: no root, nothing writable but volumes, and no strangers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stratagem.cli.manifests.kubernetes import render_kubernetes
from stratagem.cli.manifests.variable_rules import render_ray
from tests.unit.cli.manifests.kubelet import by_kind, documents, pod_specs, started_pods

_ALL = {
    "name": "run",
    "ps_replicas": 2,
    "input_replicas": 2,
    "has_eval": True,
    "has_tensorboard": True,
}
FORMS: dict[str, Callable[..., str]] = {
    **{
        workload: lambda workload=workload, **more: render_kubernetes(
            {**_ALL, "workload": workload, **more}
        )
        for workload in ("Job", "JobSet", "TrainJob")
    },
    "RayCluster": lambda **more: render_ray({"name": "run", **more}),
    "RayJob": lambda **more: render_ray({"name": "run", "script": "/train.py", **more}),
}


@pytest.fixture(params=FORMS)
def form(request) -> Callable[..., str]:
    return FORMS[request.param]


def test_pods_meet_the_restricted_pod_security_standard(form) -> None:
    specs = pod_specs(form(user_id=2000))
    assert specs
    for spec in specs:
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["runAsGroup"] == security["fsGroup"] == 2000
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_home_and_temporary_files_are_on_a_volume(form) -> None:
    for spec in pod_specs(form()):
        (container,) = spec["containers"]
        assert {"name": "HOME", "value": "/tmp"} in container["env"]
        assert {"name": "temporary", "mountPath": "/tmp"} in container["volumeMounts"]
        assert {"name": "temporary", "emptyDir": {}} in spec["volumes"]
        names = [volume["name"] for volume in spec["volumes"]]
        assert sorted(names) == sorted(mount["name"] for mount in container["volumeMounts"])


def test_root_is_writable_if_asked(form) -> None:
    for spec in pod_specs(form(read_only_root=False)):
        assert spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"] is False


def _labels(value: Any) -> list[dict[str, str]]:
    """Labels of all templates of pods in a document."""
    if isinstance(value, list):
        return [labels for part in value for labels in _labels(part)]
    if not isinstance(value, dict):
        return []
    own = [value["metadata"]["labels"]] if "containers" in value.get("spec", {}) else []
    return own + [labels for part in value.values() for labels in _labels(part)]


def test_network_policy_admits_only_the_pods_of_the_run(form) -> None:
    manifests = form()
    (policy,) = by_kind(manifests, "NetworkPolicy").values()
    mine = {"app.kubernetes.io/name": "run"}
    assert policy["spec"]["podSelector"] == {"matchLabels": mine}
    assert policy["spec"]["policyTypes"] == ["Ingress"]  # names are still looked up
    assert policy["spec"]["ingress"][0] == {"from": [{"podSelector": {"matchLabels": mine}}]}
    labels = _labels(documents(manifests))
    assert len(labels) == len(pod_specs(manifests))
    assert all(mine.items() <= one.items() for one in labels)


def test_exposed_tasks_are_admitted_at_their_port_and_tensorboard_is_not() -> None:
    manifests = render_kubernetes({**_ALL, "expose_tasks": True, "port": 6000})
    policy = by_kind(manifests, "NetworkPolicy")["run-outside"]["spec"]
    assert policy["ingress"] == [{"ports": [{"port": 6000}]}]
    (rule,) = policy["podSelector"]["matchExpressions"]
    admitted = [one for one in _labels(documents(manifests)) if one[rule["key"]] in rule["values"]]
    assert {one["app.kubernetes.io/component"] for one in admitted} == {"worker", "ps", "evaluator"}


@pytest.mark.parametrize(
    ("evictions", "budgets"),
    [(0, {"worker": 4, "ps": 2, "evaluator": 1}), (1, {"worker": 3, "ps": 1}), (9, {})],
)
@pytest.mark.parametrize("workload", ["Job", "JobSet", "TrainJob"])
def test_disruption_budgets_leave_the_rest_of_each_role(workload, evictions, budgets) -> None:
    manifests = FORMS[workload](worker_replicas=4, max_evictions=evictions)
    found = by_kind(manifests, "PodDisruptionBudget")
    assert {name: one["spec"]["minAvailable"] for name, one in found.items()} == {
        f"run-{role}": count for role, count in budgets.items()
    }
    for budget in found.values():
        selector = budget["spec"]["selector"]["matchLabels"]
        selected = [
            pod for pod in started_pods(manifests) if selector.items() <= pod.labels.items()
        ]
        assert len(selected) == budget["spec"]["minAvailable"] + evictions


@pytest.mark.parametrize("workload", ["Job", "JobSet", "TrainJob"])
def test_pods_have_the_grace_that_their_process_is_told(workload) -> None:
    for pod in started_pods(FORMS[workload](grace_period_s=77)):
        assert pod.spec["terminationGracePeriodSeconds"] == 77
        assert pod.environment["STRATAGEM_POD_GRACE_S"] == "77"
        assert "lifecycle" not in pod.container  # a hook would take from that time


@pytest.mark.parametrize("workload", ["JobSet", "TrainJob"])
def test_job_set_ends_with_its_workers_and_counts_failures_as_jobs_do(workload) -> None:
    manifests = FORMS[workload]()
    if workload == "JobSet":
        spec = by_kind(manifests, "JobSet")["run"]["spec"]
    else:
        spec = by_kind(manifests, "TrainingRuntime")["run"]["spec"]["template"]["spec"]
    worker = "worker" if workload == "JobSet" else "node"
    targets = [worker, "evaluator"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": targets}
    jobs = {one["name"]: one["template"]["spec"] for one in spec["replicatedJobs"]}
    single = by_kind(FORMS["Job"](), "Job")["run-worker"]["spec"]
    for job in jobs.values():
        for field in ("podFailurePolicy", "backoffLimitPerIndex", "maxFailedIndexes"):
            assert job[field] == single[field]
    # Trainer looks for a container of this name.
    assert jobs[worker]["template"]["spec"]["containers"][0]["name"] == worker


def test_kueue_s_label_is_on_the_object_that_it_admits(form) -> None:
    marked = [
        document["kind"]
        for document in documents(form(queue="gold"))
        if document["metadata"]["labels"].get("kueue.x-k8s.io/queue-name") == "gold"
    ]
    kinds = {"Job", "StatefulSet", "JobSet", "TrainJob", "RayCluster", "RayJob"}
    assert marked
    assert set(marked) <= kinds
    assert "kueue" not in form()

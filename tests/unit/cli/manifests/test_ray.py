"""KubeRay manifests: rendering and validation."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

import pytest

from stratagem.cli.manifests.kubernetes import validate_kubernetes
from stratagem.cli.manifests.variable_rules import ray_template, render_ray
from tests.unit.cli.manifests.definitions import open_definitions
from tests.unit.cli.manifests.kubelet import by_kind

_VALUES = {"name": "clicks", "worker_replicas": 4, "ps_replicas": 3, "num_gpus_per_worker": 8}


@pytest.fixture
def cluster() -> dict[str, Any]:
    return copy.deepcopy(by_kind(render_ray(_VALUES), "RayCluster")["clicks"])


def _groups(cluster: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = cluster["spec"]
    named = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"], **named}


def test_each_role_is_a_group_of_its_size(cluster) -> None:
    groups = _groups(cluster)
    sizes = {name: group.get("replicas") for name, group in groups.items()}
    assert sizes == {"head": None, "ps": 3, "worker": 4}
    limits = {
        name: group["template"]["spec"]["containers"][0]["resources"]["limits"]
        for name, group in groups.items()
    }
    assert limits["worker"] == {"memory": "4Gi", "nvidia.com/gpu": 8}
    assert limits["ps"] == limits["head"] == {"memory": "4Gi"}


def test_machines_show_their_purpose(cluster) -> None:
    groups = _groups(cluster)
    for role in ("ps", "worker"):
        # The operator writes the values behind an equals sign into a command of a shell.
        (word,) = shlex.split("--resources=" + groups[role]["rayStartParams"]["resources"])
        assert json.loads(word.partition("=")[2]) == {role: 1}
    assert groups["head"]["rayStartParams"]["num-cpus"] == "0"


def test_every_pod_has_the_token_and_none_has_it_in_clear(cluster) -> None:
    for group in _groups(cluster).values():
        (container,) = group["template"]["spec"]["containers"]
        variables = {one["name"]: one for one in container["env"]}
        assert variables["RAY_AUTH_MODE"]["value"] == "token"
        assert variables["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "clicks-token",
            "key": "auth_token",
        }


def test_service_leads_to_the_port_for_jobs(cluster) -> None:
    service = by_kind(render_ray({**_VALUES, "port": 9000}), "Service")["clicks-jobs"]
    assert service["spec"]["ports"] == [{"name": "jobs", "port": 9000, "targetPort": "dashboard"}]
    head = cluster["spec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"] == head["metadata"]["labels"]
    (container,) = head["spec"]["containers"]
    assert "dashboard" in {port["name"] for port in container["ports"]}


def test_all_of_it_is_valid() -> None:
    for version in ("1.29", "1.33", None):
        for values in (_VALUES, {"num_gpus_per_worker": 0}, {"script": "/a.py", "queue": "gold"}):
            assert validate_kubernetes(render_ray(values), version, open_definitions()) == []


def test_operator_has_the_token_for_its_own_requests(cluster) -> None:
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "clicks-token"}


def test_script_runs_in_a_cluster_of_its_own() -> None:
    words = ["--note", "a b", "$HOME", "'"]
    manifests = render_ray({**_VALUES, "script": "/my run.py", "cmdline_args": words})
    assert by_kind(manifests, "RayCluster") == {}
    job = by_kind(manifests, "RayJob")["clicks"]["spec"]
    assert shlex.split(job["entrypoint"]) == ["python3", "/my run.py", *words]
    assert job["shutdownAfterJobFinishes"] is True
    served = by_kind(render_ray(_VALUES), "RayCluster")["clicks"]["spec"]
    assert job["rayClusterSpec"] == served


def test_other_pods_reach_the_port_for_jobs_only_if_asked() -> None:
    def rules(**values: object) -> list[dict[str, Any]]:
        policy = by_kind(render_ray({**_VALUES, **values}), "NetworkPolicy")["clicks"]["spec"]
        return policy["ingress"]

    own, operator = rules()
    assert own == {"from": [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "clicks"}}}]}
    assert operator["ports"] == [{"port": 8265}]
    (source,) = operator["from"]
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "kuberay-operator"}
    assert rules(expose_jobs=True) == [own, {"ports": [{"port": 8265}]}]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ps_replicas", 0, "at least 1"),
        ("memory_per_task", "much", "a size such as 4Gi"),
        ("ray_version", "new", "a version such as"),
        ("token_secret", "No Secret", "the name of a secret"),
        ("train_dir", "/out", "has no variable 'train_dir'"),
        ("name", "a" * 54, "The name of the RayCluster, (?s:.)*at most 53"),
    ],
)
def test_value_that_cannot_work_is_refused(variable, value, words) -> None:
    with pytest.raises(ValueError, match=words):
        render_ray({variable: value})


def test_name_of_a_job_has_a_limit_of_its_own() -> None:
    assert "kind: RayJob" in render_ray({"name": "a" * 47, "script": "/a.py"})
    with pytest.raises(ValueError, match=r"The name of the RayJob, (?s:.)*at most 47"):
        render_ray({"name": "a" * 48, "script": "/a.py"})


def test_template_of_ones_own_is_rendered() -> None:
    own = ray_template().replace('memory_per_task = "4Gi"', 'memory_per_task = "64Gi"')
    assert 'memory: "64Gi"' in render_ray(template=own)

"""KubeRay manifests: rendering and validation."""

from __future__ import annotations

import copy
import json
import shlex
from typing import Any

import pytest

from stratagem.manifests import ray_template, render_ray, validate_kubernetes
from stratagem.manifests.schemas import schema_problems
from tests.manifests.kubelet import by_kind

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
    assert service["spec"]["ports"] == [{"name": "jobs", "port": 9000, "targetPort": "jobs"}]
    assert service["spec"]["selector"] == {
        "ray.io/cluster": cluster["metadata"]["name"],
        "ray.io/node-type": "head",
    }


def test_all_of_it_is_valid() -> None:
    for version in ("1.29", "1.33", None):
        assert validate_kubernetes(render_ray(_VALUES), version) == []
        assert validate_kubernetes(render_ray({"num_gpus_per_worker": 0}), version) == []


@pytest.mark.parametrize(
    ("path", "value", "where", "words"),
    [
        (("spec", "workerGroupSpec"), [], "spec", "'workerGroupSpec' was unexpected"),
        (("spec", "rayVersion"), 2.6, "spec.rayVersion", "not of type"),
        (("spec", "headGroupSpec", "rayStartParams"), {"num-cpus": 0}, None, "not of type"),
        (("spec", "headGroupSpec", "template", "spec"), {}, None, "'containers' is a required"),
        (("spec", "workerGroupSpecs", 0, "replicas"), -1, None, "less than the minimum"),
        (("spec", "workerGroupSpecs", 0, "groupName"), "A b", None, "does not match"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(cluster, path, value, where, words) -> None:
    place: Any = cluster
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    (problem,) = schema_problems(cluster, "1.33")
    assert problem.document == "RayCluster/clicks"
    assert words in problem.message
    if where is not None:
        assert problem.path == where


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("ps_replicas", 0, "at least 1"),
        ("memory_per_task", "much", "a size such as 4Gi"),
        ("ray_version", "new", "a version such as"),
        ("token_secret", "No Secret", "the name of a secret"),
        ("script", "/run.py", "has no variable 'script'"),
    ],
)
def test_value_that_cannot_work_is_refused(variable, value, words) -> None:
    with pytest.raises(ValueError, match=words):
        render_ray({variable: value})


def test_template_of_ones_own_is_rendered() -> None:
    own = ray_template().replace('memory_per_task = "4Gi"', 'memory_per_task = "64Gi"')
    assert 'memory: "64Gi"' in render_ray(template=own)

"""Schema of a RayCluster: the smallest cluster, and fields that are missing, unknown or wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest

jsonschema = pytest.importorskip("jsonschema", reason="needs stratagem[manifests]")

from stratagem.manifests.ray_schema import RAY_CLUSTER  # noqa: E402

SMALLEST: dict[str, Any] = {
    "apiVersion": "ray.io/v1",
    "kind": "RayCluster",
    "metadata": {"name": "a"},
    "spec": {
        "headGroupSpec": {"template": {}},
        "workerGroupSpecs": [{"groupName": "workers", "replicas": 2, "template": {}}],
    },
}


def without_references(schema: Any) -> Any:
    """The schema without Kubernetes' own types, which other files define."""
    if isinstance(schema, dict):
        return {} if "$ref" in schema else {k: without_references(v) for k, v in schema.items()}
    return [without_references(one) for one in schema] if isinstance(schema, list) else schema


VALIDATOR = jsonschema.Draft202012Validator(without_references(RAY_CLUSTER))


def test_schema_is_one_and_the_smallest_cluster_fits() -> None:
    jsonschema.Draft202012Validator.check_schema(RAY_CLUSTER)
    VALIDATOR.validate(SMALLEST)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("apiVersion",), "ray.io/v2"),
        (("kind",), "RayJob"),
        (("more",), 1),
        (("spec", "headGroupSpec"), {}),
        (("spec", "headGroupSpec", "serviceType"), "Public"),
        (("spec", "headGroupSpec", "rayStartParams"), {"num-cpus": 0}),
        (("spec", "workerGroupSpecs", 0, "replicas"), -1),
        (("spec", "workerGroupSpecs", 0, "replicas"), "2"),
        (("spec", "workerGroupSpecs", 0, "groupName"), "Workers"),
        (("spec", "workerGroupSpecs", 0, "minReplica"), 1),
        (("spec", "authOptions"), {"mode": "password"}),
        (("spec", "suspend"), "yes"),
    ],
    ids=str,
)
def test_wrong_field_is_found_at_its_place(path, value) -> None:
    cluster = copy.deepcopy(SMALLEST)
    place: Any = cluster
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (error,) = VALIDATOR.iter_errors(cluster)
    assert list(error.absolute_path)[: len(path) - 1] == list(path[:-1])


@pytest.mark.parametrize("field", ["apiVersion", "kind", "metadata", "spec"])
def test_missing_field_is_named(field) -> None:
    cluster = {key: value for key, value in SMALLEST.items() if key != field}
    (error,) = VALIDATOR.iter_errors(cluster)
    assert repr(field) in error.message

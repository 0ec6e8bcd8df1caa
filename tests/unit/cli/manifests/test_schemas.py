"""Schema validation, compared with the verdicts of kubernetes-validate."""

from __future__ import annotations

import copy
import sys
from typing import Any

import kubernetes_validate
import pytest

from stratagem.cli.manifests.kubernetes import (
    kubernetes_versions,
    render_kubernetes,
    schema_problems,
)
from tests.unit.cli.manifests.kubelet import documents
from tests.unit.cli.manifests.mutations import mutations

_EVERYTHING = documents(
    render_kubernetes(
        {
            "name": "train",
            "ps_replicas": 1,
            "has_eval": True,
            "has_tensorboard": True,
            "expose_tasks": True,
        }
    )
)
_SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "a"},
    "spec": {"ports": [{"port": 5000}]},
}


def _changed(*path: str | int, value: object) -> dict[str, Any]:
    document = copy.deepcopy(_SERVICE)
    place: Any = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return document


def test_versions_are_in_order_and_reach_to_the_newest() -> None:
    versions = kubernetes_versions()
    assert versions == sorted(versions, key=lambda version: int(version.split(".")[1]))
    assert versions[-1] == ".".join(kubernetes_validate.latest_version().split(".")[:2])
    assert "1.29" in versions


@pytest.mark.parametrize("version", ["1.29", "1.33"])
def test_all_kinds_are_right_by_the_package_s_own_verdict(version) -> None:
    assert {document["kind"] for document in _EVERYTHING} == {
        "Deployment",
        "Job",
        "NetworkPolicy",
        "PersistentVolumeClaim",
        "PodDisruptionBudget",
        "Secret",
        "Service",
        "StatefulSet",
    }
    for document in _EVERYTHING:
        assert schema_problems(document, version) == []
        assert kubernetes_validate.validate(document, version, strict=True) == version


@pytest.mark.parametrize(
    ("document", "path", "message"),
    [
        (_changed("spec", "prots", value=[]), "spec", "'prots' was unexpected"),
        (_changed("spec", "ports", 0, "port", value="http"), "spec.ports[0].port", "not of type"),
        (_changed("spec", "ports", 0, value={}), "spec.ports[0]", "'port' is a required property"),
        (_changed("metadata", "name", value=5), "metadata.name", "not of type"),
        (_changed("apiVersion", value="v2"), "", "Kubernetes 1.33 has no Service in v2"),
        (_changed("kind", value="Serfice"), "", "Kubernetes 1.33 has no Serfice in v1"),
    ],
)
def test_what_the_schema_does_not_allow_is_named_with_its_place(document, path, message) -> None:
    (problem,) = schema_problems(document, "1.33")
    assert (problem.document.partition("/")[0], problem.path) == (document["kind"], path)
    assert message in problem.message
    with pytest.raises(
        (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
    ):
        kubernetes_validate.validate(document, "1.33", strict=True)


def test_value_that_has_none_of_several_forms_is_named_with_its_place() -> None:
    claim = next(d for d in _EVERYTHING if d["kind"] == "PersistentVolumeClaim")
    wrong = copy.deepcopy(claim)
    wrong["spec"]["resources"]["requests"]["storage"] = ["10Gi"]
    (problem,) = schema_problems(wrong, "1.33")
    assert problem.path == "spec.resources.requests.storage"
    assert problem.message.startswith("['10Gi'] is not valid")


@pytest.mark.parametrize("kind", sorted({document["kind"] for document in _EVERYTHING}))
def test_every_wrong_variant_of_a_rendered_document_is_refused(kind) -> None:
    document = next(one for one in _EVERYTHING if one["kind"] == kind)
    accepted = [name for name, one in mutations(document) if not schema_problems(one, "1.37")]
    assert accepted == []


def test_enumerations_that_the_published_schemas_leave_out_are_checked() -> None:
    job = copy.deepcopy(next(one for one in _EVERYTHING if one["kind"] == "Job"))
    pod = job["spec"]["template"]["spec"]
    pod["restartPolicy"] = "never"
    pod["securityContext"]["seccompProfile"]["type"] = "Default"
    job["spec"]["podFailurePolicy"]["rules"][0]["action"] = "Skip"
    assert {problem.path for problem in schema_problems(job, "1.33")} == {
        "spec.template.spec.restartPolicy",
        "spec.template.spec.securityContext.seccompProfile.type",
        "spec.podFailurePolicy.rules[0].action",
    }
    assert kubernetes_validate.validate(job, "1.33", strict=True) == "1.33"


@pytest.mark.parametrize(
    ("size", "is_valid"), [("10Gi", True), (".5", True), ("1e3", True), ("ten", False), ("", False)]
)
def test_quantity_has_the_form_of_one(size, is_valid) -> None:
    claim = copy.deepcopy(next(d for d in _EVERYTHING if d["kind"] == "PersistentVolumeClaim"))
    claim["spec"]["resources"]["requests"]["storage"] = size
    assert (schema_problems(claim, "1.33") == []) == is_valid


def test_all_mistakes_of_a_document_are_reported() -> None:
    document = _changed("spec", "prots", value=[])
    document["metadata"]["owner"] = "a"
    assert {problem.path for problem in schema_problems(document, "1.33")} == {"spec", "metadata"}


@pytest.mark.parametrize(
    "document", [{}, {"kind": "Job"}, {"kind": 3, "apiVersion": "v1"}, {"apiVersion": "v1"}]
)
def test_document_without_a_kind_is_named(document) -> None:
    (problem,) = schema_problems(document, "1.33")
    assert problem.message == "kind or apiVersion is missing"


@pytest.mark.parametrize("kind", ["../service", "Service/", "a b", ""])
def test_kind_that_is_not_a_name_is_not_a_file(kind) -> None:
    (problem,) = schema_problems(_changed("kind", value=kind), "1.33")
    assert problem.message == f"Kubernetes 1.33 has no {kind} in v1"


def test_version_that_is_not_installed_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"schemas of Kubernetes '1.7' are not installed(?s:.)*one of 1(?s:.)*1.33"
    ):
        schema_problems(_SERVICE, "1.7")


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    document = _changed("kind", value="ConfigMap")  # a kind whose schema no other test has loaded
    with pytest.raises(ImportError, match=r"Validating manifests needs jsonschema, which"):
        schema_problems(document, "1.33")

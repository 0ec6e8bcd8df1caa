"""Custom resources: a small definition, and the projects' own for the rendered manifests."""

from __future__ import annotations

import copy
import re
import sys
from typing import Any

import pytest
import yaml

from stratagem.cli.manifests.custom_resources import (
    CustomResources,
    Problem,
    document_name,
    metadata_name,
    parse_documents,
    read_definitions,
)
from stratagem.cli.manifests.kubernetes import (
    render_kubernetes,
    schema_problems,
    unchecked_rules,
    validate_kubernetes,
)
from stratagem.cli.manifests.variable_rules import render_ray
from tests.unit.cli.manifests.definitions import definition, open_definitions, released_definitions
from tests.unit.cli.manifests.kubelet import documents
from tests.unit.cli.manifests.mutations import mutations

VERSION = "1.37"
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["spec"],
    "x-kubernetes-validations": [{"rule": "size(self.metadata.name) <= 63"}],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["mode", "size"],
            "properties": {
                "mode": {"type": "string", "enum": ["fast", "safe"]},
                "size": {"type": "integer", "format": "int32", "minimum": 1, "default": 1},
                "share": {"type": "number", "maximum": 1, "exclusiveMaximum": True},
                "port": {"x-kubernetes-int-or-string": True},
                "note": {"type": "string", "nullable": True, "pattern": "^a"},
                "names": {
                    "type": "array",
                    "items": {"type": "string"},
                    "x-kubernetes-list-type": "set",
                },
                "labels": {"type": "object", "additionalProperties": {"type": "string"}},
                "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
                "other": {"type": "object", "x-kubernetes-embedded-resource": True},
                "ports": {
                    "type": "array",
                    "x-kubernetes-list-type": "map",
                    "x-kubernetes-list-map-keys": ["number", "protocol"],
                    "items": {
                        "type": "object",
                        "x-kubernetes-validations": [
                            {"rule": "self.number > 0"},
                            {"rule": "self == oldSelf"},
                        ],
                        "properties": {
                            "number": {"type": "integer"},
                            "protocol": {"type": "string", "default": "TCP"},
                        },
                    },
                },
                "one": {
                    "type": "object",
                    "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
                    "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
                    "not": {"properties": {"a": {"enum": ["bad"]}}, "required": ["a"]},
                },
                "template": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            },
        }
    },
}
_DEFINITION = definition("Thing", "example.com/v1", _SCHEMA)


@pytest.fixture(scope="module")
def things() -> CustomResources:
    return read_definitions(yaml.safe_dump(_DEFINITION))


def _thing(**fields: object) -> dict[str, Any]:
    return {
        "apiVersion": "example.com/v1",
        "kind": "Thing",
        "metadata": {"name": "a"},
        "spec": {"mode": "fast", **fields},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"size": 3, "share": 0.5, "port": 80, "names": ["a", "b"]},
        {"port": "http", "note": None, "labels": {"a": "b"}, "free": {"x": [1]}},
        {"other": {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b"}}},
        {"ports": [{"number": 1}, {"number": 1, "protocol": "UDP"}]},
        {"one": {"a": "good"}},
    ],
)
def test_valid_document_has_no_problem(things, fields) -> None:
    assert schema_problems(_thing(**fields), VERSION, things) == []


@pytest.mark.parametrize(
    ("fields", "path", "message"),
    [
        ({"mode": "slow"}, "spec.mode", "'slow' is not one of ['fast', 'safe']"),
        ({"size": 0}, "spec.size", "less than the minimum"),
        ({"size": 2**31}, "spec.size", "greater than the maximum"),
        ({"size": True}, "spec.size", "not of type"),
        ({"share": 1}, "spec.share", "greater than or equal to the maximum"),
        ({"port": 1.5}, "spec.port", "not of type"),
        ({"port": None}, "spec.port", "not of type"),
        ({"note": "b"}, "spec.note", "not valid under any"),
        ({"names": ["a", "a"]}, "spec.names", "non-unique"),
        ({"labels": {"a": 1}}, "spec.labels.a", "not of type"),
        ({"names2": {}}, "spec", "'names2' was unexpected"),
        ({"ports": [{"number": 1}, {"number": 1, "protocol": "TCP"}]}, "spec.ports", "twice"),
        ({"ports": [{"number": 1, "name": "a"}]}, "spec.ports[0]", "'name' was unexpected"),
        ({"one": {}}, "spec.one", "not valid under any"),
        ({"one": {"a": "x", "b": "x"}}, "spec.one", "valid under each"),
        ({"one": {"a": "bad"}}, "spec.one", "should not be valid"),
    ],
)
def test_wrong_document_is_refused_at_its_place(things, fields, path, message) -> None:
    (problem,) = schema_problems(_thing(**fields), VERSION, things)
    assert (problem.document, problem.path) == ("Thing/a", path)
    assert message in problem.message


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"spec": {}}, "'mode' is a required property"),
        ({"more": 1}, "'more' was unexpected"),
        ({"metadata": {"name": "a", "names2": {}}}, "'names2' was unexpected"),
    ],
)
def test_fields_of_every_resource_are_checked(things, change, message) -> None:
    (problem,) = schema_problems({**_thing(), **change}, VERSION, things)
    assert message in problem.message


def test_document_without_a_definition_is_a_problem_that_says_where_to_get_one(things) -> None:
    document = {**_thing(), "kind": "Other"}
    (problem,) = schema_problems(document, VERSION, things)
    assert problem.message == (
        "Kubernetes 1.37 has no Other in example.com/v1; pass its definition with --crds, from: "
        "kubectl get crd -o yaml"
    )


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        (
            {"containers": [], "restartPolicy": "Nevr"},
            "spec.template.spec.restartPolicy",
            "'Nevr' is not one of",
        ),
        (
            {"template": {"spec": {"containers": []}}, "completionMode": "indexed"},
            "spec.template.spec.completionMode",
            "'indexed' is not one of",
        ),
        ({"containers": [{}]}, "spec.template.spec.containers[0]", "'name' is a required"),
    ],
)
def test_templates_of_pods_and_jobs_are_checked_as_kubernetes_does(
    things, spec, path, message
) -> None:
    (problem,) = schema_problems(_thing(template={"spec": spec}), VERSION, things)
    assert problem.path == path
    assert message in problem.message


def test_rules_in_cel_are_named_where_they_apply(things) -> None:
    text = yaml.safe_dump(_thing(ports=[{"number": 1}]))
    assert [str(rule) for rule in unchecked_rules(text, things)] == [
        "Thing/a: (root): size(self.metadata.name) <= 63",
        "Thing/a: spec.ports[0]: self.number > 0",
    ]


def test_list_of_a_cluster_is_read_and_versions_not_served_are_not() -> None:
    old = copy.deepcopy(_DEFINITION)
    old["spec"]["versions"][0] |= {"name": "v0", "served": False}
    cluster = {"apiVersion": "v1", "kind": "List", "items": [_DEFINITION, old]}
    read = read_definitions(yaml.safe_dump(cluster))
    assert read.schema("Thing", "example.com/v1") is not None
    assert read.schema("Thing", "example.com/v0") is None


@pytest.mark.parametrize(
    "text", ["kind: Service", "kind: CustomResourceDefinition", "a: [", "kind: List\nitems: [{}]"]
)
def test_text_that_is_no_definition_is_refused(text) -> None:
    with pytest.raises(ValueError, match=r"definitions cannot be read(?s:.)*kubectl get crd"):
        read_definitions(text)


FORMS = {
    "JobSet": lambda: render_kubernetes(
        {"workload": "JobSet", "ps_replicas": 2, "has_eval": True, "queue": "gold"}
    ),
    "TrainJob": lambda: render_kubernetes(
        {"workload": "TrainJob", "ps_replicas": 2, "has_eval": True, "memory_per_task": "4Gi"}
    ),
    "RayCluster": lambda: render_ray({"queue": "gold"}),
    "RayJob": lambda: render_ray({"script": "/train.py", "cmdline_args": "--epochs 5"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_rendered_forms_are_valid_for_the_released_definitions(form) -> None:
    definitions = released_definitions()
    manifests = FORMS[form]()
    for version in ("1.29", VERSION):
        assert validate_kubernetes(manifests, version, definitions) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_wrong_variant_of_a_rendered_form_is_refused(form) -> None:
    definitions = released_definitions()
    accepted = []
    for document in documents(FORMS[form]()):
        if "." in document["apiVersion"].partition(".k8s.io")[0] or document["kind"] == "JobSet":
            for name, wrong in mutations(document):
                if not schema_problems(wrong, VERSION, definitions):
                    accepted.append(name)
    assert accepted == []


@pytest.mark.parametrize("form", FORMS)
def test_templates_inside_a_rendered_form_are_valid(form) -> None:
    for version in ("1.29", VERSION):
        assert validate_kubernetes(FORMS[form](), version, open_definitions()) == []


# Strict YAML parsing, as in Kubernetes.


def test_empty_documents_are_left_out() -> None:
    documents, problems = parse_documents("---\na: 1\n---\n# nothing\n---\nb: {c: [1, 2]}\n")
    assert documents == [{"a": 1}, {"b": {"c": [1, 2]}}]
    assert problems == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2\n", "YAML: duplicate key 'a' in .* line 2, column 1"),
        ("a:\n- b: 1\n  c: 2\n  b: 3\n", "duplicate key 'b' in .* line 4"),
        ("a: [1", "YAML: .* line 1"),
        ("a: \x07", "YAML: "),
        ("- 1", "document 1: a list, not a mapping"),
        ("a: 1\n---\ntext", "document 2: a str, not a mapping"),
        ("", "YAML: it contains no document"),
        ("---\n---\n", "YAML: it contains no document"),
        ("!!python/object/apply:os.getcwd []", "YAML: could not determine a constructor"),
    ],
)
def test_problem_is_reported(text, message) -> None:
    _, (problem,) = parse_documents(text)
    assert problem.path == ""
    assert re.search(message, str(problem))


def test_documents_before_the_mistake_are_kept() -> None:
    documents, problems = parse_documents("a: 1\n---\nb: [")
    assert documents == [{"a": 1}]
    assert len(problems) == 1


def test_keys_of_different_mappings_may_be_the_same() -> None:
    documents, problems = parse_documents("a: &x {b: 1}\nc: {b: 1}\nd: *x\n1: 2\n")
    assert documents == [{"a": {"b": 1}, "c": {"b": 1}, "d": {"b": 1}, 1: 2}]
    assert problems == []


@pytest.mark.parametrize(
    ("document", "name", "called"),
    [
        ({"kind": "Job", "metadata": {"name": "a"}}, "a", "Job/a"),
        ({"kind": "Job"}, "", "Job/(no name)"),
        ({"metadata": ["a"]}, "", "(no kind)/(no name)"),
        ({"kind": "Job", "metadata": {"name": 3}}, "", "Job/(no name)"),
    ],
)
def test_documents_are_called_by_kind_and_name(document, name, called) -> None:
    assert metadata_name(document) == name
    assert document_name(document) == called


def test_problem_is_one_line() -> None:
    assert str(Problem("Job/a", "spec", "wrong")) == "Job/a: spec: wrong"
    assert str(Problem("Job/a", "", "wrong")) == "Job/a: wrong"


def test_library_that_is_missing_is_named(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"Validating manifests needs yaml, which"):
        parse_documents("a: 1")

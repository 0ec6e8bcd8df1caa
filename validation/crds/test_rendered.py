"""Rendered custom resources are valid for the definitions that projects release."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.cli.manifests.rendering import render_kubernetes, render_ray
from tests.unit.cli.manifests.kubelet import documents
from tests.unit.cli.manifests.schemas import CUSTOM_KINDS
from validation.crds.definitions import validators

_OPTIONS = {
    "restart_agent": "registry/agent:v0.12.0",
    "preferred_topology": "rack",
    "tpu_accelerator": "tpu-v5-lite-podslice",
    "tpu_topology": "4x4",
}
_FORMS = {
    "plain JobSet": lambda: render_kubernetes({"workload": "JobSet", "has_eval": True}),
    "JobSet": lambda: render_kubernetes(
        {"workload": "JobSet", "ps_replicas": 2, "has_eval": True, "queue": "gold", **_OPTIONS}
    ),
    "TrainJob": lambda: render_kubernetes(
        {"workload": "TrainJob", "ps_replicas": 2, "memory_per_task": "4Gi", **_OPTIONS}
    ),
    "RayCluster": lambda: render_ray({"queue": "gold", "required_topology": "rack"}),
    "RayJob": lambda: render_ray({"script": "/train.py", "cmdline_args": "--epochs 5"}),
}


def _custom(form: str) -> list[dict[str, Any]]:
    return [one for one in documents(_FORMS[form]()) if one["kind"] in CUSTOM_KINDS]


def _mistakes(document: dict[str, Any]) -> list[str]:
    validator = validators()[document["apiVersion"], document["kind"]]
    return [f"{one.json_path}: {one.message}" for one in validator.iter_errors(document)]


@pytest.mark.parametrize("form", _FORMS)
def test_form_is_valid(form) -> None:
    assert form.split()[-1] in {one["kind"] for one in _custom(form)}
    for document in _custom(form):
        assert _mistakes(document) == []


@pytest.mark.parametrize("form", _FORMS)
def test_unknown_field_is_refused_everywhere(form) -> None:
    for document in _custom(form):
        for path, mapping in _mappings(document["spec"], f"{document['kind']}.spec"):
            mapping["unknown"] = {"a": []}
            assert _mistakes(document), path
            del mapping["unknown"]


def _mappings(value: Any, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(value, dict):
        yield path, value
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(part, dict | list):
            yield from _mappings(part, f"{path}.{key}")

"""Rendered manifests against Kubernetes' own schemas, which kubernetes-validate contains.

An API server checks more: the words of enumerations, names, and rules between fields.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import kubernetes_validate
import referencing

from tests.unit.cli.manifests.kubelet import documents

OLDEST = "1.29"
NEWEST = kubernetes_validate.latest_version().rpartition(".")[0]
CUSTOM_KINDS = ("JobSet", "RayCluster", "RayJob", "TrainJob", "TrainingRuntime")

_ADDRESS = "https://kubernetes.io/api/_definitions.json"


def mistakes(manifests: str, version: str = OLDEST) -> list[str]:
    """Unknown fields, missing ones and wrong types.

    Of custom resources only the templates of pods and Jobs are checked, as their controllers'
    requests are; `make test-external NAME=crds` checks the rest.
    """
    found = []
    for document in documents(manifests):
        group, _, number = document["apiVersion"].rpartition("/")
        kind = f"{group.partition('.')[0] or 'core'}.{number}.{document['kind']}"
        parts = [(kind, document)]
        if document["kind"] in CUSTOM_KINDS:
            parts = list(_templates(document))
            assert parts or document["kind"] == "TrainJob"
        for definition, part in parts:
            for error in _validator(version, definition).iter_errors(part):
                found.append(f"{document['kind']}: {error.json_path}: {error.message}")
    return found


def _templates(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the definition and the value of each template of a pod or a Job."""
    for part in value.values() if isinstance(value, dict) else value:
        spec = part.get("spec") if isinstance(part, dict) else None
        if isinstance(spec, dict) and "containers" in spec:
            yield "core.v1.PodTemplateSpec", part
        elif isinstance(spec, dict) and "completions" in spec:
            yield "batch.v1.JobTemplateSpec", part
        elif isinstance(part, dict | list):
            yield from _templates(part)


@functools.cache
def _validator(version: str, definition: str) -> Any:
    reference = {"$ref": f"{_ADDRESS}#/$defs/io.k8s.api.{definition}"}
    return jsonschema.Draft202012Validator(reference, registry=_definitions(version))


@functools.cache
def _definitions(version: str) -> Any:
    root = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    # The strict schemas refuse unknown fields.
    text = (root / f"v{version}.0-local-strict" / "_definitions.json").read_text(encoding="utf-8")
    resource = referencing.Resource.from_contents(json.loads(text))
    return resource @ referencing.Registry()

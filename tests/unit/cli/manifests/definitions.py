"""Definitions of custom resources: open ones that admit any field, and those that projects release.

`make test-external NAME=crds` downloads the released ones; `crds.toml` has their checksums.
"""

from __future__ import annotations

import functools
import hashlib
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from stratagem.cli.manifests.custom_resources import CustomResources, read_definitions

FOLDER = Path(__file__).parents[4] / "build" / "crds"
RELEASED = tomllib.loads(Path(__file__).with_name("crds.toml").read_text())["crds"]

_OPEN = {
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "RayCluster": "ray.io/v1",
    "RayJob": "ray.io/v1",
    "TrainJob": "trainer.kubeflow.org/v1alpha1",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
}


def definition(kind: str, api_version: str, schema: dict[str, Any]) -> dict[str, Any]:
    group, _, version = api_version.partition("/")
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.lower()}s.{group}"},
        "spec": {
            "group": group,
            "names": {"kind": kind, "plural": f"{kind.lower()}s"},
            "versions": [
                {"name": version, "served": True, "schema": {"openAPIV3Schema": schema}},
            ],
        },
    }


def open_definitions_text() -> str:
    """Definitions with which only templates of pods and Jobs are checked."""
    schema = {
        "type": "object",
        "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    }
    return yaml.safe_dump_all(definition(kind, version, schema) for kind, version in _OPEN.items())


@functools.cache
def open_definitions() -> CustomResources:
    return read_definitions(open_definitions_text())


@functools.cache
def released_definitions() -> CustomResources:
    """The projects' own definitions; skips the test if they were not downloaded."""
    texts = []
    for name, one in RELEASED.items():
        file = FOLDER / f"{name}.yaml"
        if not file.exists():
            pytest.skip(f"needs {file.name} of {one['repository']}: make test-external NAME=crds")
        content = file.read_bytes()
        assert hashlib.sha256(content).hexdigest() == one["sha256"], f"{file} is another version"
        texts.append(content.decode())
    return read_definitions("\n---\n".join(texts))

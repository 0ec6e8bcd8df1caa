"""JSON schemas of Kubernetes kinds, from the package kubernetes-validate, and of KubeRay."""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

from stratagem.manifests.documents import Problem, document_name
from stratagem.manifests.ray_schema import RAY_CLUSTER
from stratagem.messages import explain
from stratagem.optional_libraries import load

__all__ = ["kubernetes_versions", "schema_problems"]

_REQUIREMENT = {"needed_by": "Validating manifests", "install": "'stratagem[manifests]'"}
# The strict schemas reject unknown keys.
_FOLDER = re.compile(r"v(\d+\.\d+)\.\d+-local-strict")


def kubernetes_versions() -> list[str]:
    """Returns the Kubernetes versions whose schemas are installed, such as "1.33", oldest first."""
    return sorted(_schema_folders(), key=lambda version: [int(part) for part in version.split(".")])


def schema_problems(document: dict[str, Any], version: str) -> list[Problem]:
    """Validates a document against the schema of its kind in a version of `kubernetes_versions`."""
    name = document_name(document)
    kind, api_version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(api_version, str):
        return [Problem(name, "", "kind or apiVersion is missing")]
    validator = _validator(version, kind, api_version)
    if validator is None:
        return [Problem(name, "", f"Kubernetes {version} has no {kind} in {api_version}")]
    return list(_schema_errors(validator, document, name))


class _Validator(Protocol):
    """A validator of `jsonschema`."""

    def iter_errors(self, instance: object, /) -> Iterator[Any]: ...


def _schema_errors(validator: _Validator, document: dict[str, Any], name: str) -> Iterator[Problem]:
    for error in validator.iter_errors(document):
        path = "".join(
            f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path
        )
        yield Problem(name, path.removeprefix("."), error.message)


@functools.cache
def _schema_folders() -> dict[str, Any]:
    load("kubernetes_validate", **_REQUIREMENT)
    root = importlib.resources.files("kubernetes_validate") / "kubernetes-json-schema"
    found = ((_FOLDER.fullmatch(folder.name), folder) for folder in root.iterdir())
    return {match[1]: folder for match, folder in found if match}


@functools.cache
def _definitions(version: str) -> Any:
    folders = _schema_folders()
    if version not in folders:
        raise ValueError(
            explain(
                f"The schemas of Kubernetes {version!r} are not installed.",
                expected=f"one of {', '.join(kubernetes_versions())}.",
                fix="choose an installed version, or upgrade the package kubernetes-validate.",
            )
        )
    text = (folders[version] / "_definitions.json").read_text(encoding="utf-8")
    resource = load("referencing", **_REQUIREMENT).Resource.from_contents(json.loads(text))
    return resource @ load("referencing", **_REQUIREMENT).Registry()


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> Any:
    """Returns None if the version has no such kind."""
    registry = _definitions(version)
    if (kind, api_version) == ("RayCluster", "ray.io/v1"):
        return load("jsonschema", **_REQUIREMENT).Draft202012Validator(
            RAY_CLUSTER, registry=registry
        )
    # The file of "rbac.authorization.k8s.io/v1" ends in "-rbac-v1.json".
    group, slash, number = api_version.partition("/")
    suffix = f"{group.partition('.')[0]}-{number}" if slash else group
    file_name = f"{kind.lower()}-{suffix}.json"
    file = _schema_folders()[version] / file_name
    if not re.fullmatch(r"[-.a-z0-9]+", file_name) or not file.is_file():
        return None
    schema = json.loads(file.read_text(encoding="utf-8"))
    return load("jsonschema", **_REQUIREMENT).Draft202012Validator(schema, registry=registry)

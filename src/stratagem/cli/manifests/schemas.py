"""JSON schemas of Kubernetes kinds, from kubernetes-validate, and of custom resources.

The published schemas have no enumerations; `enums.json` has them, from Kubernetes' own types. They
have no form of quantities either.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
import re
from collections.abc import Iterator
from typing import Any, Protocol

from stratagem.cli.manifests.custom_resources import CustomResources
from stratagem.cli.manifests.documents import Problem, document_name
from stratagem.messages import explain
from stratagem.optional_libraries import load

_REQUIREMENT = {"needed_by": "Validating manifests", "install": "'stratagem[manifests]'"}
_DEFINITIONS = "https://kubernetes.io/api/_definitions.json"
# Such as 10Gi, 0.5, 100m and 1e3.
_QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"
# The strict schemas reject unknown keys.
_FOLDER = re.compile(r"v(\d+\.\d+)\.\d+-local-strict")


def kubernetes_versions() -> list[str]:
    """Returns the Kubernetes versions whose schemas are installed, such as "1.33", oldest first."""
    return sorted(_schema_folders(), key=lambda version: [int(part) for part in version.split(".")])


def schema_problems(
    document: dict[str, Any], version: str, custom: CustomResources | None = None
) -> list[Problem]:
    """Validates a document against the schema of its kind in a version of `kubernetes_versions`.

    `custom` has the schemas of custom resources; templates of pods and Jobs in these are also
    validated as Kubernetes does when their controller creates them.
    """
    name = document_name(document)
    kind, api_version = document.get("kind"), document.get("apiVersion")
    if not isinstance(kind, str) or not isinstance(api_version, str):
        return [Problem(name, "", "kind or apiVersion is missing")]
    validator = _validator(version, kind, api_version)
    if validator is not None:
        return list(_schema_errors(validator, document, name))
    schema = None if custom is None else custom.schema(kind, api_version)
    if schema is None:
        return [Problem(name, "", _unknown_kind(version, kind, api_version))]
    problems = list(_schema_errors(_new_validator(version, schema), document, name))
    for path, definition, template in _templates(document, ""):
        inner = _new_validator(version, {"$ref": f"{_DEFINITIONS}#/$defs/{definition}"})
        problems += _schema_errors(inner, template, name, path)
    return list({(one.path, one.message): one for one in problems}.values())


def _unknown_kind(version: str, kind: str, api_version: str) -> str:
    message = f"Kubernetes {version} has no {kind} in {api_version}"
    group = api_version.partition("/")[0]
    if "." not in group:
        return message
    return f"{message}; pass its definition with --crds, from: kubectl get crd -o yaml"


def _templates(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yields the path, the definition and the value of each template of a pod or a Job."""
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in parts:
        place = _join(path, key)
        definition = _template_definition(part)
        if definition:
            yield place, definition, part
        elif isinstance(part, dict | list):
            yield from _templates(part, place)


def _template_definition(value: Any) -> str:
    """Returns the name of the definition of a template, or "" for another value."""
    spec = value.get("spec") if isinstance(value, dict) else None
    if not isinstance(spec, dict):
        return ""
    if "containers" in spec:
        return "io.k8s.api.core.v1.PodTemplateSpec"
    inner = _template_definition(spec.get("template"))
    return "io.k8s.api.batch.v1.JobTemplateSpec" if inner else ""


def _join(path: str, key: str | int) -> str:
    return f"{path}[{key}]" if isinstance(key, int) else f"{path}.{key}".removeprefix(".")


class _Validator(Protocol):
    """A validator of `jsonschema`."""

    def iter_errors(self, instance: object, /) -> Iterator[Any]: ...


def _schema_errors(
    validator: _Validator, document: Any, name: str, prefix: str = ""
) -> Iterator[Problem]:
    for error in validator.iter_errors(document):
        yield Problem(name, functools.reduce(_join, error.absolute_path, prefix), error.message)


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
    definitions = json.loads(text)
    _add_enumerations(definitions["$defs"])
    definitions["$defs"]["io.k8s.apimachinery.pkg.api.resource.Quantity"]["pattern"] = _QUANTITY
    resource = load("referencing", **_REQUIREMENT).Resource.from_contents(definitions)
    return resource @ load("referencing", **_REQUIREMENT).Registry()


def _add_enumerations(definitions: dict[str, Any]) -> None:
    file = importlib.resources.files("stratagem.cli.manifests") / "enums.json"
    for name, fields in json.loads(file.read_text(encoding="utf-8"))["fields"].items():
        properties = definitions.get(name, {}).get("properties", {})
        for field, values in fields.items():
            schema = properties.get(field.removesuffix("[]"), {})
            (schema.get("items", {}) if field.endswith("[]") else schema)["enum"] = [*values, None]


@functools.cache
def _validator(version: str, kind: str, api_version: str) -> Any:
    """Returns None if the version has no such kind."""
    # The file of "rbac.authorization.k8s.io/v1" ends in "-rbac-v1.json".
    group, slash, number = api_version.partition("/")
    suffix = f"{group.partition('.')[0]}-{number}" if slash else group
    file_name = f"{kind.lower()}-{suffix}.json"
    _definitions(version)
    file = _schema_folders()[version] / file_name
    if not re.fullmatch(r"[-.a-z0-9]+", file_name) or not file.is_file():
        return None
    return _new_validator(version, json.loads(file.read_text(encoding="utf-8")))


def _new_validator(version: str, schema: dict[str, Any]) -> Any:
    jsonschema = load("jsonschema", **_REQUIREMENT)
    validator_class = jsonschema.validators.extend(
        jsonschema.Draft202012Validator, {"uniqueKeys": _unique_keys}
    )
    return validator_class(schema, registry=_definitions(version))


def _unique_keys(
    validator: Any, keys: dict[str, Any], values: Any, schema: dict[str, Any]
) -> Iterator[Any]:
    """Yields an error for each item with the keys of an earlier one; `keys` has the defaults."""
    del validator, schema
    seen: list[list[Any]] = []
    for item in values if isinstance(values, list) else ():
        if not isinstance(item, dict):
            continue
        found = [item.get(key, default) for key, default in keys.items()]
        if found in seen:
            error = load("jsonschema", **_REQUIREMENT).ValidationError
            yield error(f"{dict(zip(keys, found, strict=True))} is listed twice")
        seen.append(found)

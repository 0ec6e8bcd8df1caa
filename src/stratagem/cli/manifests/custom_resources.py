"""Schemas of custom resources, from the definitions (CRDs) that projects release."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

from stratagem.environment import load
from stratagem.errors import explain

# YAML documents of a manifest, parsed strictly, and the problems found in them.

_REQUIREMENT = {"needed_by": "Validating manifests", "install": "'stratagem[clusters]'"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One problem found in a manifest.

    `document` is kind and name, such as "Job/train-worker"; `path` is the place in it, such as
    "spec.template", or "" for the whole document.
    """

    document: str
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.document, self.path, self.message)))


def parse_documents(text: str) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Parses a YAML stream as strictly as Kubernetes; returns nonempty documents and problems."""
    yaml = load("yaml", **_REQUIREMENT)
    documents: list[dict[str, Any]] = []
    problems: list[Problem] = []
    try:
        for number, document in enumerate(yaml.load_all(text, Loader=_strict_loader(yaml)), 1):
            if isinstance(document, dict):
                documents.append(document)
            elif document is not None:
                kind = type(document).__name__
                problems.append(Problem(f"document {number}", "", f"a {kind}, not a mapping"))
    except yaml.YAMLError as error:
        problems.append(Problem("YAML", "", " ".join(str(error).split())))
    if not documents and not problems:
        problems.append(Problem("YAML", "", "it contains no document"))
    return documents, problems


def metadata_name(document: dict[str, Any]) -> str:
    """Returns the name in a document's metadata, or ""."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def document_name(document: dict[str, Any]) -> str:
    """Returns "kind/name" for error messages, with placeholders for missing parts."""
    return f"{document.get('kind', '(no kind)')}/{metadata_name(document) or '(no name)'}"


def _strict_loader(yaml: types.ModuleType) -> Any:
    class StrictLoader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen and isinstance(key.value, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"duplicate key {key.value!r}", key.start_mark
                    )
                seen.add(str(key.value))
            return super().construct_mapping(node, deep=deep)

    return StrictLoader


_OBJECT_META = (
    "https://kubernetes.io/api/_definitions.json"
    "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
)
_OWN_FIELDS = {
    "apiVersion": {"type": "string"},
    "kind": {"type": "string"},
    "metadata": {"$ref": _OBJECT_META},
}
_LIMITS = {"int32": 2**31, "int64": 2**63}
_RULES = "x-kubernetes-validations"
# Keywords that mean the same in JSON schema. Others are converted, or say nothing about validity.
_SAME = (
    *("enum", "pattern", "minLength", "maxLength", "minItems", "maxItems"),
    *("multipleOf", "minProperties", "maxProperties"),
)


@dataclasses.dataclass(frozen=True)
class UncheckedRule:
    """A rule in CEL that applies to part of a document, and that only an API server evaluates."""

    document: str
    path: str
    rule: str

    def __str__(self) -> str:
        return f"{self.document}: {self.path or '(root)'}: {self.rule}"


class CustomResources:
    """Schemas by kind and API version of the definitions in a YAML stream.

    Example:
        >>> from stratagem.cli.manifests.custom_resources import CustomResources
        >>> CustomResources({}).schema("RayCluster", "ray.io/v1") is None
        True
    """

    def __init__(self, schemas: Mapping[tuple[str, str], dict[str, Any]]) -> None:
        self._schemas = dict(schemas)
        self._converted: dict[tuple[str, str], dict[str, Any]] = {}

    def schema(self, kind: str, api_version: str) -> dict[str, Any] | None:
        """Returns a strict JSON schema: unknown fields are errors, as in strict validation."""
        key = kind, api_version
        if key in self._schemas and key not in self._converted:
            self._converted[key] = _root_schema(self._schemas[key])
        return self._converted.get(key)

    def unchecked_rules(self, document: dict[str, Any]) -> list[UncheckedRule]:
        """Returns the rules in CEL that apply when the document is created."""
        schema = self._schemas.get((document["kind"], document["apiVersion"]))
        if schema is None:
            return []
        name = document_name(document)
        return [UncheckedRule(name, path, rule) for path, rule in _rules(schema, document, "")]


def read_definitions(text: str) -> CustomResources:
    """Parses CustomResourceDefinitions, such as the output of `kubectl get crd -o yaml`.

    Raises ValueError for a document that is none.
    """
    documents, problems = parse_documents(text) if text.strip() else ([], [])
    schemas: dict[tuple[str, str], dict[str, Any]] = {}
    for document in _flattened(documents):
        try:
            _add_definition(document, schemas)
        except (KeyError, TypeError) as error:
            problems.append(Problem(document_name(document), "", f"no definition: {error!r}"))
    if problems:
        raise ValueError(
            explain(
                f"The definitions cannot be read: {problems[0]}.",
                expected="CustomResourceDefinitions of apiextensions.k8s.io/v1, as YAML.",
                fix="pass the output of: kubectl get crd NAME -o yaml",
            )
        )
    return CustomResources(schemas)


def _flattened(documents: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields documents, and the items of lists in their place."""
    for document in documents:
        if document.get("kind") == "List":
            yield from (one for one in document.get("items") or [] if isinstance(one, dict))
        else:
            yield document


def _add_definition(
    document: dict[str, Any], schemas: dict[tuple[str, str], dict[str, Any]]
) -> None:
    if document["kind"] != "CustomResourceDefinition":
        raise TypeError(f"its kind is {document['kind']}")
    spec = document["spec"]
    for version in spec["versions"]:
        if version["served"]:
            key = spec["names"]["kind"], f"{spec['group']}/{version['name']}"
            schemas[key] = version["schema"]["openAPIV3Schema"]


def _root_schema(schema: dict[str, Any]) -> dict[str, Any]:
    converted = _json_schema({**schema, "x-kubernetes-embedded-resource": True})
    required = {"apiVersion", "kind", "metadata", *converted["required"]}
    return {**converted, "required": sorted(required)}


def _json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Converts a structural schema of OpenAPI to JSON schema; fields that it lacks are errors."""
    result = {key: schema[key] for key in _SAME if key in schema}
    for key in ("allOf", "anyOf", "oneOf"):
        if key in schema:
            result[key] = [_json_schema(one) for one in schema[key]]
    if "not" in schema:
        result["not"] = _json_schema(schema["not"])
    result |= _number_rules(schema) | _list_rules(schema) | _object_rules(schema)
    kinds = ["integer", "string"] if schema.get("x-kubernetes-int-or-string") else []
    kinds = kinds or [schema[key] for key in ("type",) if key in schema]
    if not kinds or not schema.get("nullable"):
        return {**result, "type": kinds} if kinds else result
    return {"anyOf": [{"type": "null"}, {**result, "type": kinds}]}


def _number_rules(schema: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    limit = _LIMITS.get(schema.get("format", ""))
    for key, bound in (("minimum", -(limit or 0)), ("maximum", (limit or 0) - 1)):
        exclusive = "exclusive" + key.capitalize()
        if key in schema:
            result[exclusive if schema.get(exclusive) else key] = schema[key]
        elif limit is not None:
            result[key] = bound
    return result


def _list_rules(schema: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if "items" in schema:
        result["items"] = _json_schema(schema["items"])
    if schema.get("uniqueItems") or schema.get("x-kubernetes-list-type") == "set":
        result["uniqueItems"] = True
    if schema.get("x-kubernetes-list-type") == "map":
        fields = schema["items"].get("properties", {})
        result["uniqueKeys"] = {
            key: fields.get(key, {}).get("default") for key in schema["x-kubernetes-list-map-keys"]
        }
    return result


def _object_rules(schema: dict[str, Any]) -> dict[str, Any]:
    properties = {name: _json_schema(one) for name, one in schema.get("properties", {}).items()}
    if schema.get("x-kubernetes-embedded-resource"):
        properties = {**properties, **_OWN_FIELDS}
    result: dict[str, Any] = {"properties": properties} if properties else {}
    # Missing values are filled in before they are checked.
    fields = schema.get("properties", {})
    result["required"] = [
        name for name in schema.get("required", ()) if "default" not in fields.get(name, {})
    ]
    others = schema.get("additionalProperties")
    if isinstance(others, dict):
        result["additionalProperties"] = _json_schema(others)
    elif (
        schema.get("type") == "object"
        and not others
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        result["additionalProperties"] = False
    return result


def _rules(schema: dict[str, Any], value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yields places and rules of a value; rules about changes do not apply to a new document."""
    for one in schema.get(_RULES) or ():
        if "oldSelf" not in one["rule"]:
            yield path, " ".join(one["rule"].split())
    if isinstance(value, dict):
        others = schema.get("additionalProperties")
        for key, part in value.items():
            inner = schema.get("properties", {}).get(key, others)
            if isinstance(inner, dict):
                yield from _rules(inner, part, f"{path}.{key}".removeprefix("."))
    elif isinstance(value, list) and "items" in schema:
        for index, part in enumerate(value):
            yield from _rules(schema["items"], part, f"{path}[{index}]")

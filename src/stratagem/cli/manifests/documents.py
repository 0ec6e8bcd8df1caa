"""YAML documents of a manifest, parsed strictly, and the problems found in them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Hashable
from typing import Any

from stratagem.optional_libraries import load

_REQUIREMENT = {"needed_by": "Validating manifests", "install": "'stratagem[manifests]'"}


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

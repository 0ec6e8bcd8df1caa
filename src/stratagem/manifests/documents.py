"""The documents of a YAML stream, and what is wrong with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import Any

from stratagem.optional_libraries import load

__all__ = ["Problem", "document_name", "own_name", "parse_documents"]

_NEEDED = {"needed_by": "Validating manifests", "install": "'stratagem[manifests]'"}


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong in a manifest.

    Args:
        document: kind and name, such as "Job/train-worker".
        path: where in it, such as "spec.template"; "" for the whole.
        message: what is wrong.
    """

    document: str
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.document, self.path, self.message)))


def parse_documents(text: str) -> tuple[list[dict[str, Any]], list[Problem]]:
    """Reads a YAML stream as strictly as Kubernetes does: a key stands once in a mapping.

    Args:
        text: the stream.

    Returns:
        The documents, empty ones left out, and what is wrong with the text.

    Raises:
        ImportError: PyYAML is not installed.
    """
    yaml = load("yaml", **_NEEDED)
    documents: list[dict[str, Any]] = []
    problems: list[Problem] = []
    try:
        for number, document in enumerate(yaml.load_all(text, Loader=_strict_loader(yaml)), 1):
            if isinstance(document, dict):
                documents.append(document)
            elif document is not None:
                kind = type(document).__name__
                problems.append(Problem(f"document {number}", "", f"a {kind} and no mapping"))
    except yaml.YAMLError as error:
        problems.append(Problem("YAML", "", " ".join(str(error).split())))
    if not documents and not problems:
        problems.append(Problem("YAML", "", "no document in it"))
    return documents, problems


def own_name(document: dict[str, Any]) -> str:
    """Returns the name in a document's metadata.

    Args:
        document: any.

    Returns:
        The name; "" where it has none.
    """
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else ""


def document_name(document: dict[str, Any]) -> str:
    """Returns what errors call a document.

    Args:
        document: any.

    Returns:
        Its kind and its name, as far as it has them.
    """
    return f"{document.get('kind', '(no kind)')}/{own_name(document) or '(no name)'}"


def _strict_loader(yaml: Any) -> Any:
    class StrictLoader(yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen and isinstance(key.value, str):
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key.value!r} stands twice", key.start_mark
                    )
                seen.add(str(key.value))
            return super().construct_mapping(node, deep=deep)

    return StrictLoader

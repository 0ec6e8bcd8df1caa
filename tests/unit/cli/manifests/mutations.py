"""Wrong variants of a document: unknown fields, wrong types, and wrong words of enumerations."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

# Fields of the rendered documents whose values are words of an enumeration.
_ENUMERATIONS = {
    *("accessModes", "action", "completionMode", "fsGroupChangePolicy", "operator"),
    *("podManagementPolicy", "policyTypes", "restartPolicy", "unhealthyPodEvictionPolicy"),
}
_ENUMERATIONS_INSIDE = {("seccompProfile", "type"), ("authOptions", "mode"), ("spec", "type")}
_NUMBERS_OR_TEXTS = {"minAvailable", "port", "targetPort"}
_Path = tuple[str | int, ...]


def mutations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields a description and a variant that an API server refuses."""
    for path, value in _places(document, ()):
        name = ".".join(map(str, path)) or "(root)"
        if isinstance(value, dict):
            yield f"unknown field in {name}", _changed(document, (*path, "unknown"), {"a": []})
            continue
        yield f"wrong type of {name}", _changed(document, path, {"a": {"b": []}})
        words = [part for part in path if isinstance(part, str)]
        if words[-1] in _ENUMERATIONS or tuple(words[-2:]) in _ENUMERATIONS_INSIDE:
            if not isinstance(value, list):
                yield f"wrong word in {name}", _changed(document, path, f"{value}x")
        elif isinstance(value, bool | int) and words[-1] not in _NUMBERS_OR_TEXTS:
            yield f"text in {name}", _changed(document, path, "many")


def _places(value: Any, path: _Path) -> Iterator[tuple[_Path, Any]]:
    yield path, value
    parts: Any = ()
    if isinstance(value, dict):
        parts = value.items()
    elif isinstance(value, list):
        parts = enumerate(value)
    for key, part in parts:
        yield from _places(part, (*path, key))


def _changed(document: dict[str, Any], path: _Path, value: object) -> dict[str, Any]:
    result = copy.deepcopy(document)
    place: Any = result
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return result

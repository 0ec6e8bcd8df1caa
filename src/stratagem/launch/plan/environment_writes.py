"""Static check for scripts that set environment variables."""

from __future__ import annotations

import ast
from collections.abc import Iterator

_ENVIRONMENT = "environ"
_SETTERS = ("putenv", "unsetenv")
_READERS = ("copy", "get", "items", "keys", "values")


def writes_environment(text: str) -> bool:
    """Returns False only if the script does not use `os.environ`, or only reads it.

    Reads are `os.environ["A"]`, `os.environ.get("A")` and `"A" in os.environ`.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return True
    reads = {id(node) for node in _reads(tree)}
    return any(_names_environment(node) and id(node) not in reads for node in ast.walk(tree))


def _names_environment(node: ast.AST) -> bool:
    names: list[object] = []
    if isinstance(node, ast.Attribute):
        names = [node.attr]
    elif isinstance(node, ast.Name):
        names = [node.id]
    elif isinstance(node, ast.Constant):
        names = [node.value]  # getattr(os, "environ")
    elif isinstance(node, ast.alias):
        # Imported under its own name, it is found at its uses.
        names = [node.name] if node.asname or node.name in _SETTERS else []
    return any(name in (_ENVIRONMENT, *_SETTERS) for name in names)


def _reads(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes through which the environment is only read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from node.comparators
        elif (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)) or (
            isinstance(node, ast.Attribute) and node.attr in _READERS
        ):
            yield node.value

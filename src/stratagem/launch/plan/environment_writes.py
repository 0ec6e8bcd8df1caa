"""Whether a script sets variables of its environment, as far as its text tells."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["sets_variables"]

_ENVIRONMENT = "environ"
_SETTERS = ("putenv", "unsetenv")
_READERS = ("copy", "get", "items", "keys", "values")


def sets_variables(text: str) -> bool:
    """Returns whether a script may set variables, or do what cannot be told from its text.

    Args:
        text: of the script.

    Returns:
        False where it has no `os.environ`, or only reads it: `os.environ["A"]`,
        `os.environ.get("A")`, `"A" in os.environ`.

    Example:
        >>> sets_variables("import os; print(os.environ['HOME'])")
        False
        >>> sets_variables("import os; os.environ['HOME'] = '/root'")
        True
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
        # Under its own name it is found where it is used.
        names = [node.name] if node.asname or node.name in _SETTERS else []
    return any(name in (_ENVIRONMENT, *_SETTERS) for name in names)


def _reads(tree: ast.AST) -> Iterator[ast.AST]:
    """What stands for the environment where that is only read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            yield from node.comparators
        elif (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)) or (
            isinstance(node, ast.Attribute) and node.attr in _READERS
        ):
            yield node.value

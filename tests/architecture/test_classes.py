"""Class names are unique, and the class of an object stays what its constructor chose."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable

from tests.architecture.source_tree import Module, assert_none, from_text, package

# Keras has created a variable that joins a strategy, and that others reference.
_ALLOWED = {"stratagem.keras.variables.variable_creation": 2}


def test_class_is_assigned_only_where_a_variable_joins_or_leaves_a_strategy() -> None:
    violations = []
    for module in package():
        lines = [
            target.lineno
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Attribute) and target.attr == "__class__"
        ]
        allowed = _ALLOWED.get(module.name, 0)
        violations += [module.at(line) for line in lines[allowed:]]
    assert_none(violations)


def repeated_names(modules: Iterable[Module]) -> list[str]:
    places: dict[str, list[str]] = defaultdict(list)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node.lineno))
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def test_no_two_classes_have_the_same_name() -> None:
    assert_none(repeated_names(package()))


def test_repeated_name_is_found() -> None:
    modules = [from_text("class _A: ...\nclass B: ..."), from_text("def f():\n    class _A: ...")]
    assert len(repeated_names(modules)) == 1

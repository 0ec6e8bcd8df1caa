"""The class of an object stays what its constructor chose, with one exception."""

from __future__ import annotations

import ast

from tests.architecture.source_tree import assert_none, package

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

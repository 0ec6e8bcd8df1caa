"""Environment variables are read and written in `environment.py` only."""

from __future__ import annotations

import ast

import pytest

from tests.architecture.source_tree import Module, assert_none, from_text, package

READER = "stratagem.environment"
ACCESSES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def environment_accesses(module: Module) -> list[str]:
    if module.name == READER:
        return []
    found = [
        (imported.line, imported.full_name)
        for imported in module.imports
        if imported.module == "os" and imported.name in ACCESSES
    ]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and node.attr in ACCESSES:
            found.append((node.lineno, ast.unparse(node)))
    return [f"{module.at(line)}: {name}" for line, name in sorted(found)]


def test_environment_is_accessed_in_one_place() -> None:
    assert_none([access for module in package() for access in environment_accesses(module)])


@pytest.mark.parametrize(
    "text",
    [
        "import os\nos.environ['HOME']",
        "import os\nos.getenv('HOME')",
        "from os import environ",
        "import os as system\nsystem.environ.get('HOME')",
    ],
)
def test_access_elsewhere_is_found(text) -> None:
    assert len(environment_accesses(from_text(text))) == 1
    assert environment_accesses(from_text(text, READER)) == []

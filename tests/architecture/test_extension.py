"""Tools built on the library import public names and those of docs/design/extension.md only."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from types import ModuleType

import pytest

import stratagem as sg
from tests.architecture.source_tree import REPOSITORY, Import, Module, assert_none, package

TOOLS = ("estimator", "planning", "goodput", "monitoring", "profiling", "manifests")
_PAGE = REPOSITORY / "docs" / "design" / "extension.md"


@cache
def _listed() -> frozenset[str]:
    names = re.findall(r"^\| `([\w.]+)` \|", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(names) == len(set(names)), "a name stands twice"
    return frozenset(f"stratagem.{name}" for name in names)


@cache
def _public() -> frozenset[int]:
    """The ids of all public objects, in public submodules too."""
    found: set[int] = set()
    modules: list[ModuleType] = [sg]
    for module in modules:
        for name in module.__all__:
            value = getattr(module, name)
            found.add(id(value))
            is_ours = inspect.ismodule(value) and value.__name__.startswith("stratagem.")
            if is_ours and hasattr(value, "__all__") and value not in modules:
                modules.append(value)
    return frozenset(found)


def _object(imported: Import) -> object:
    module = importlib.import_module(imported.module)
    assert imported.name is not None
    return getattr(module, imported.name)


def _reached(module: Module) -> list[Import]:
    """Imports of a tool from the rest of the package."""
    own = f"stratagem.{module.room}"
    return [
        one
        for one in module.imports
        if one.module.startswith("stratagem") and not f"{one.module}.".startswith(f"{own}.")
    ]


def _tools() -> list[Module]:
    return [module for module in package() if module.room in TOOLS]


def _not_public() -> dict[str, str]:
    """The names that tools import and that are not public, with a place of each."""
    return {
        one.full_name: module.at(one.line)
        for module in _tools()
        for one in _reached(module)
        if id(_object(one)) not in _public()
    }


def test_tools_import_public_and_listed_names_only() -> None:
    used = _not_public()
    assert_none([f"{used[name]}: {name}" for name in sorted(used.keys() - _listed())])


def test_each_listed_name_is_in_use() -> None:
    assert_none(sorted(_listed() - _not_public().keys()))


@pytest.mark.parametrize("name", ["get_strategy", "Strategy"])
def test_public_names_need_no_entry(name) -> None:
    assert id(getattr(sg, name)) in _public()

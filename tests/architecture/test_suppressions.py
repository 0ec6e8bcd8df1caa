"""At most two suppressed warnings in a thousand lines, each naming what it suppresses."""

from __future__ import annotations

import io
import re
import tokenize

import pytest

from tests.architecture.source_tree import Module, assert_none, from_text, package

MAX_PER_THOUSAND_LINES = 2
SUPPRESSION = re.compile(r"#\s*(noqa|type:\s*ignore|pyright:|ruff:|fmt:)")
NAMED = re.compile(r"noqa: [A-Z]+\d+|(?:type: |pyright: )ignore\[[\w-]+\]")


def suppressions(module: Module) -> list[str]:
    """Comments that silence a tool, with where they stand."""
    if not SUPPRESSION.search(module.text):  # much quicker than to split the text into tokens
        return []
    tokens = tokenize.generate_tokens(io.StringIO(module.text).readline)
    return [
        f"{module.at(token.start[0])}: {token.string}"
        for token in tokens
        if token.type == tokenize.COMMENT and SUPPRESSION.search(token.string)
    ]


def too_many(modules: list[Module]) -> bool:
    found = sum(len(suppressions(module)) for module in modules)
    return found * 1000 > MAX_PER_THOUSAND_LINES * sum(module.num_lines for module in modules)


def test_package_suppresses_little() -> None:
    modules = package()
    found = [suppression for module in modules for suppression in suppressions(module)]
    assert not too_many(modules), found


def test_each_suppression_names_its_rule() -> None:
    found = [suppression for module in package() for suppression in suppressions(module)]
    assert_none([suppression for suppression in found if not NAMED.search(suppression)])


@pytest.mark.parametrize(
    "comment",
    ["# noqa: F401", "# type: ignore[attr-defined]", "# pyright: basic", "#noqa", "# ruff: noqa"],
)
def test_suppression_is_counted(comment) -> None:
    text = f"import os  {comment}\n" + "x = 1\n" * 498
    once = from_text(text)
    assert len(suppressions(once)) == 1
    assert too_many([once])
    assert not too_many([once, from_text("x = 1\n")])


def test_text_about_suppressions_is_not_counted() -> None:
    assert suppressions(from_text('"""Write # noqa: F401 after it."""\n')) == []

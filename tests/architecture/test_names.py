"""Files and definitions are named after what they are, never after where they were left over."""

from __future__ import annotations

import ast
import re

import pytest

from tests.architecture.source_tree import Module, assert_none, everything, from_text

BANNED_WORDS = {"util", "utils", "helper", "helpers", "common", "misc", "impl", "lib"}
VERSION = re.compile(r"^v\d+$")
# `sg.compat.v1` is TensorFlow's own name for its old spellings.
ALLOWED_PARTS = {"v1"}


def words(name: str) -> list[str]:
    """Splits snake_case and CamelCase: "RunnerV2_impl" is runner, v2, impl."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return [word.lower() for word in spaced.split("_") if word]


def empty_names(module: Module) -> list[str]:
    parts = [part for part in module.path.with_suffix("").parts if part not in ALLOWED_PARTS]
    named = [(1, part) for part in parts]
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            named.append((node.lineno, node.name))
    return [
        f"{module.at(line)}: {name!r} says nothing about what it is"
        for line, name in named
        if any(word in BANNED_WORDS or VERSION.match(word) for word in words(name))
    ]


def test_names_say_what_they_are() -> None:
    assert_none([violation for module in everything() for violation in empty_names(module)])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("stratagem.values.utils", ""),
        ("stratagem.helpers.values", ""),
        ("stratagem.values.distribute_lib", ""),
        ("stratagem.values.x", "class StrategyV2: ..."),
        ("stratagem.values.x", "def run_impl(): ..."),
        ("stratagem.values.x", "def run_v2(): ..."),
    ],
)
def test_empty_name_is_found(name, text) -> None:
    assert len(empty_names(from_text(text, name))) == 1


def test_name_that_contains_a_banned_word_inside_another_is_fine() -> None:
    text = "class Library: ...\ndef helpful_implementation(): ..."
    assert empty_names(from_text(text, "stratagem.compat.v1.calibration")) == []

"""Every row of the migration table is true, and every recorded name of TensorFlow has a row."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import keras

import stratagem as sg
from stratagem.cli import main as command
from stratagem.cli.migrate.symbols import STATUSES, Symbol, load_symbols

_FOLDER = Path(__file__).parent
_ROOTS: dict[str, ModuleType] = {"sg": sg, "keras": keras, "jax": jax}
_NAME = re.compile(r"(?:sg|keras|jax)(?:\.\w+)+")
_SPAN = re.compile(r"`([^`]+)`")
SYMBOLS = load_symbols()
BY_NAME = {symbol.name: symbol for symbol in SYMBOLS}


def _recorded(file: str) -> dict[str, list[str] | None]:
    """Names of a listing with their parameters; None for what is not called."""
    found: dict[str, list[str] | None] = {}
    for line in (_FOLDER / file).read_text(encoding="utf-8").splitlines():
        if match := re.fullmatch(r"([\w.]+)(?:\((.*)\))?", line):
            text = match[2]
            found[match[1]] = None if text is None else [one for one in text.split(", ") if one]
    return found


TENSORFLOW = _recorded("tensorflow_symbols.txt")
TENSORFLOW_1 = _recorded("tensorflow_1_symbols.txt")


def _instance_attributes(cls: type) -> set[str]:
    """Names that a class annotates, or that its constructor assigns."""
    found: set[str] = set()
    for base in cls.__mro__:
        found |= set(vars(base).get("__annotations__", {}))
        if inspect.isfunction(vars(base).get("__init__")) and base.__module__ != "builtins":
            try:
                tree = ast.parse(textwrap.dedent(inspect.getsource(base.__init__)))
            except OSError:  # made by dataclasses
                continue
            found |= {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            }
    return found


def _resolved(name: str) -> Any:
    """Returns what a dotted name stands for; None for an attribute of instances."""
    root, *parts = name.split(".")
    value: Any = _ROOTS[root]
    path = value.__name__
    for part in parts:
        path = f"{path}.{part}"
        if inspect.isclass(value) and not hasattr(value, part):
            if part in _instance_attributes(value):
                return None
            raise AttributeError(name)
        if not hasattr(value, part):
            importlib.import_module(path)
        value = getattr(value, part)
    return value


def _unresolved(name: str) -> bool:
    if name.startswith("stratagem "):
        return name.split(" ")[1] not in command.commands
    try:
        _resolved(name)
    except (AttributeError, ImportError, KeyError):
        return True
    return False


def _refused_parameters(symbol: Symbol, theirs: list[str] | None) -> list[str]:
    """Parameters of TensorFlow that the counterpart does not accept by name and by place."""
    value = None if theirs is None else _resolved(symbol.here)
    if value is None or not callable(value):
        return []
    ours = inspect.signature(value).parameters
    wanted = [name for name in theirs or () if not name.startswith("*")]
    if any(one.kind is one.VAR_KEYWORD for one in ours.values()) and "*" in "".join(theirs or ()):
        return []
    by_place = [
        name
        for name, one in ours.items()
        if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) and name != "self"
    ]
    return [name for place, name in enumerate(wanted) if by_place[place : place + 1] != [name]]


def test_every_recorded_name_of_tensorflow_has_a_row() -> None:
    assert len(TENSORFLOW) > 450
    assert sorted((TENSORFLOW | TENSORFLOW_1).keys() - BY_NAME.keys()) == []


def test_counterparts_exist() -> None:
    assert [one for one in SYMBOLS if one.here and _unresolved(one.here)] == []


def test_names_in_differences_exist() -> None:
    spans = [(one.name, span) for one in SYMBOLS for span in _SPAN.findall(one.difference)]
    named = [(name, found) for name, span in spans for found in _NAME.findall(span)]
    assert len(named) > 100
    assert [one for one in named if _unresolved(one[1])] == []


def test_same_and_renamed_take_the_parameters_of_tensorflow() -> None:
    refused = {
        symbol.name: names
        for symbol in SYMBOLS
        if symbol.status in ("same", "renamed")
        if (names := _refused_parameters(symbol, TENSORFLOW.get(symbol.name)))
    }
    assert refused == {}


def test_same_names_are_the_same() -> None:
    differing = [
        symbol.name
        for symbol in SYMBOLS
        if symbol.status == "same" and symbol.name.split(".")[-1] != symbol.here.split(".")[-1]
    ]
    assert differing == []


def test_every_status_is_used() -> None:
    assert {symbol.status for symbol in SYMBOLS} == set(STATUSES)


def test_rows_say_what_their_status_needs() -> None:
    assert len(BY_NAME) == len(SYMBOLS)
    for one in SYMBOLS:
        has_counterpart = one.status in ("same", "renamed", "changed")
        assert bool(one.here) == has_counterpart, one
        assert one.difference or one.status in ("same", "renamed"), one
        assert not one.difference or one.status != "same", one

"""The table of rules, against Keras, JAX and this package as they are installed."""

from __future__ import annotations

import builtins
import importlib
import inspect
import tomllib
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.cli.migrate import rules

_TABLE = tomllib.loads(Path(rules.__file__).with_name("renames.toml").read_text(encoding="utf-8"))
_ROOTS = {"sg": sg, "keras": keras, "jax": jax, "np": np}
_DOCS = Path(__file__).parents[4]
_CALLS = {name: text for name, text in _TABLE["calls"].items() if text}


def value_of(target: str) -> object:
    root, *parts = target.split(".")
    if not parts:
        return getattr(builtins, root)
    value = _ROOTS.get(root) or importlib.import_module(root)
    for part in parts:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", sorted(_CALLS))
def test_counterpart_has_the_arguments(name) -> None:
    call = rules.resolve(name).call
    new = {one.new for one in call.arguments if one.new not in ("", "_") and not one.refused}
    function = value_of(call.target)
    if new and function is not open:
        parameters = inspect.signature(function).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        assert takes_any or new <= set(parameters)


@pytest.mark.parametrize("name", sorted(name for name, new in _TABLE["names"].items() if new))
def test_new_name_exists(name) -> None:
    target = _TABLE["names"][name]
    if target.replace(".", "_").isidentifier() and target != "None":
        value_of(target)


@pytest.mark.parametrize(
    ("name", "target"),
    [(f"{old}.x", new) for old, new in _TABLE["prefixes"].items() if new != "keras"],
)
def test_prefix_exists_here(name, target) -> None:
    value_of(f"{target}.__name__")
    assert rules.resolve(name) is None  # there is no x


@pytest.mark.parametrize("name", sorted(_TABLE["aliases"]))
def test_alias_has_a_rule(name) -> None:
    new = _TABLE["aliases"][name]
    special = new.startswith(("config.list_", "compat."))
    assert special or rules.resolve(name) is not None


def test_pages_of_the_advice_exist() -> None:
    pages = {page for _, page in [*_TABLE["marks"].values(), *_TABLE["modules"].values()]}
    assert [page for page in sorted(pages) if not (_DOCS / page).is_file()] == []


@pytest.mark.parametrize(
    ("qualified", "name"),
    [
        ("tensorflow", ""),
        ("tensorflow.keras.layers.Dense", "keras.layers.Dense"),
        ("tensorflow.compat.v1.layers.dense", "layers.dense"),
        ("tensorflow.python.keras.Model", "keras.Model"),
        ("tensorflow_core.keras.Model", "keras.Model"),
        ("keras.Model", "keras.Model"),
        ("tensorflow_datasets.load", None),
        ("numpy.zeros", None),
    ],
)
def test_tensorflow_name(qualified, name) -> None:
    assert rules.tensorflow_name(qualified) == name


def test_advice_takes_its_text_from_the_table_of_symbols(monkeypatch, tmp_path) -> None:
    text = '[[symbol]]\nname = "tf.foo.bar"\nhere = ""\nstatus = "absent"\n'
    (tmp_path / "symbols.toml").write_text(f'{text}difference = "Use baz."\n')
    (tmp_path / "renames.toml").write_bytes(
        Path(rules.__file__).with_name("renames.toml").read_bytes()
    )
    monkeypatch.setattr(rules, "_FOLDER", tmp_path)
    rules._differences.cache_clear()
    assert str(rules.advice("foo.bar")) == "tf.foo.bar: Use baz, see docs/migrate/tool.md"
    rules._differences.cache_clear()


def test_advice_without_a_table_of_symbols(monkeypatch, tmp_path) -> None:
    assert str(rules.advice("foo.bar")).startswith("tf.foo.bar: there is no counterpart")

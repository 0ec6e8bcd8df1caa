"""The table of settings: names, variables, kinds, and what comes from them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jsonschema
import pytest

from stratagem import settings
from stratagem.launch.plan.options import LaunchOptions
from stratagem.settings import (
    COUNT,
    DELAY,
    FACTOR,
    NUMBER,
    SECONDS,
    SETTINGS,
    SWITCH,
    TEXT,
    TEXTS,
    Kind,
    Setting,
    choice,
)

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "environment.md"
OF_LIBRARY = [setting for setting in SETTINGS.values() if setting.meaning]
OF_LAUNCH = [setting for setting in SETTINGS.values() if setting.is_option]
COLORS = choice("a color", ("red", "blue"))
VALUES = [True, False, 0, 1, -3, 0.5, 1.5, "", "red", "RED", "1", None, [], ["a"], {}]


def name_of(setting: Setting) -> str:
    return setting.name


def texts_of(kind: Kind) -> dict[str, object]:
    """Valid texts of a kind, and their values."""
    if kind.type is bool:
        on, off = ("1", "true", "True", "YES", "on"), ("0", "false", "No", "OFF", "")
        return dict.fromkeys(on, True) | dict.fromkeys(off, False)
    if kind.type is int:
        return {"1": 1, "1000": 1000}
    if kind.type == int | float:
        return {"7.5": 7.5, "3": 3.0, "1e3": 1000.0}
    if "enum" in kind.limits:
        return {word: word.lower() for word in kind.limits["enum"]}
    return {"": "", " a B ": " a B "}


def wrong_texts_of(kind: Kind) -> dict[str, str]:
    """Wrong texts of a kind, and what the message says is expected."""
    if kind.type is bool:
        return dict.fromkeys(("2", "maybe", " 1"), "1, true, yes, on, or 0, false, no, off.")
    if kind.type is int:
        least = kind.limits["minimum"]
        texts = ("", "-1", "2.5", "many", *(["0"] if least else []))
        return dict.fromkeys(texts, f"an integer of at least {least}.")
    if kind.type == int | float:
        texts = ("", "-1", "0", "nan", "inf", "soon")
        return dict.fromkeys(texts, "a number of seconds above 0.")
    return dict.fromkeys(("other", " "), "") if "enum" in kind.limits else {}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=name_of)
def test_names_come_from_one_name_and_the_default_from_its_text(setting) -> None:
    assert SETTINGS[setting.name] is setting
    assert setting.variable == f"STRATAGEM_{setting.name.upper()}"
    assert setting.key.replace("-", "_") == setting.name
    assert setting.description.endswith(".")
    assert setting.is_option or setting.meaning == setting.description
    if setting.default is not None:
        assert setting.kind.has_type(setting.default)
        assert setting.kind.parse(str(setting.default)) == setting.default


@pytest.mark.parametrize("setting", OF_LIBRARY, ids=name_of)
def test_setting_is_that_of_its_variable(monkeypatch, setting) -> None:
    monkeypatch.delenv(setting.variable, raising=False)
    assert settings.read(setting.name) == setting.default
    for text, value in texts_of(setting.kind).items():
        monkeypatch.setenv(setting.variable, text)
        found = settings.read(setting.name)
        assert (found, type(found)) == (value, type(value))
    for text, expected in wrong_texts_of(setting.kind).items():
        monkeypatch.setenv(setting.variable, text)
        with pytest.raises(ValueError, match=setting.variable) as caught:
            settings.read(setting.name)
        received, wanted, fix = str(caught.value).splitlines()
        name = f"Environment variable {setting.variable}"
        assert received == f"{name}: {text!r} is not {setting.kind.name}."
        assert wanted.startswith("Expected ")
        assert expected in wanted
        assert fix == "Fix: correct or unset the environment variable."


def test_every_variable_is_in_the_documentation() -> None:
    page = PAGE.read_text()
    for setting in OF_LIBRARY:
        default = setting.default
        default = (default or "none") if isinstance(default, str) else int(default)
        assert f"| `{setting.variable}` | `{default}` | {setting.meaning} |" in page
    assert page.split("Each setting has")[0].count("| `STRATAGEM_") == len(OF_LIBRARY)


def test_options_are_the_fields_of_the_launcher_with_their_defaults() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(LaunchOptions)}
    options = {setting.name: setting.default for setting in OF_LAUNCH}
    assert list(options) == list(fields)
    # None is the level of the environment, whose default is "auto".
    assert options == fields | {"log_level": "auto"}


def accepts(kind: Kind, value: object) -> bool:
    if not kind.has_type(value):
        return False
    try:
        kind.parse(str(value))
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "kind", [SWITCH, COUNT, NUMBER, SECONDS, DELAY, FACTOR, TEXT, TEXTS, COLORS]
)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_schema_accepts_what_is_accepted(kind, value) -> None:
    valid = jsonschema.Draft202012Validator(kind.schema).is_valid(value)
    assert accepts(kind, value) is valid


def test_upper_case_is_accepted_where_it_is_asked_for() -> None:
    assert choice("a color", ("red",), any_case=True).parse("RED") == "red"
    with pytest.raises(ValueError, match=r"'RED' is not a color\.\nExpected one of red, blue"):
        COLORS.parse("RED")
    with pytest.raises(ValueError, match="Expected a warm one"):
        choice("a color", ("red",), "a warm one.").parse("blue")

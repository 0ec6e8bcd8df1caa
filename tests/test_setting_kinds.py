"""Kinds of settings: text, TOML values, and JSON Schema agree."""

from __future__ import annotations

import jsonschema
import pytest

from stratagem import environment
from stratagem.environment import COUNT, SECONDS, SWITCH, TEXT, choice

COLORS = choice("a color", ("red", "blue"))
VALUES = [True, False, 0, 1, -3, 2.5, 0.0, float("inf"), "", "red", "RED", "1", None, [], {}]


def accepts(kind, value: object) -> bool:
    text = kind.text_of(value)
    if text is None:
        return False
    try:
        kind(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", [SWITCH, COUNT, SECONDS, TEXT, COLORS])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_schema_accepts_what_is_accepted(kind, value) -> None:
    if kind is SECONDS and value == float("inf"):
        pytest.skip("JSON has no infinity")
    valid = jsonschema.Draft202012Validator(kind.schema).is_valid(value)
    assert accepts(kind, value) is valid


@pytest.mark.parametrize("setting", environment.VARIABLES)
def test_default_comes_back_from_its_text(setting) -> None:
    variable = environment.VARIABLES[setting]
    text = variable.parse.text_of(variable.default)
    assert text is not None
    assert variable.parse(text) == variable.default


def test_upper_case_is_accepted_where_it_is_asked_for() -> None:
    assert choice("a color", ("red",), any_case=True)("RED") == "red"
    with pytest.raises(ValueError, match=r"'RED' is not a color\.\nExpected one of red, blue"):
        COLORS("RED")
    with pytest.raises(ValueError, match="Expected a warm one"):
        choice("a color", ("red",), "a warm one.")("blue")

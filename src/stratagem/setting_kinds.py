"""Kinds of values of settings: how text becomes one, and what JSON Schema says about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from stratagem.messages import explain

LOG_LEVELS = ("auto", "debug", "info", "warning", "error")
LOG_FORMATS = ("text", "json")

_FIX = "correct or unset the environment variable."


@dataclasses.dataclass(frozen=True, kw_only=True)
class SettingKind:
    """Kind of a setting's value; called with text, it returns the value or raises ValueError.

    `noun` describes valid values in messages. `schema` describes them in JSON Schema, as they are
    written in a TOML file.
    """

    noun: str
    schema: Mapping[str, Any]
    parse: Callable[[str], Any]

    def __call__(self, text: str) -> Any:
        """Returns the value of a text, such as that of an environment variable."""
        return self.parse(text)

    def text_of(self, value: object) -> str | None:
        """Returns the text of a TOML value, or None for a value of another type."""
        types = {"boolean": bool, "integer": int, "number": int | float}.get(
            self.schema["type"], str
        )
        if not isinstance(value, types) or isinstance(value, bool) != (types is bool):
            return None
        return str(int(value)) if isinstance(value, bool) else str(value)


def _parse_switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(
        explain(
            f"{text!r} is not a boolean.",
            expected="1, true, yes, on, or 0, false, no, off.",
            fix=_FIX,
        )
    )


def _at_least(minimum: int) -> SettingKind:
    noun = f"an integer of at least {minimum}"

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < minimum:
            raise ValueError(explain(f"{text!r} is not a count.", expected=f"{noun}.", fix=_FIX))
        return int(text)

    return SettingKind(noun=noun, schema={"type": "integer", "minimum": minimum}, parse=parse)


def _parse_seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(
            explain(
                f"{text!r} is not a time limit.",
                expected="a number of seconds above 0.",
                fix=_FIX,
            )
        )
    return value


SWITCH = SettingKind(noun="true or false", schema={"type": "boolean"}, parse=_parse_switch)
COUNT = _at_least(1)
COUNT_OR_NONE = _at_least(0)
SECONDS = SettingKind(
    noun="a number of seconds above 0",
    schema={"type": "number", "exclusiveMinimum": 0},
    parse=_parse_seconds,
)
TEXT = SettingKind(noun="a string", schema={"type": "string"}, parse=str)


def choice(
    noun: str, values: tuple[str, ...], expected: str | None = None, *, any_case: bool = False
) -> SettingKind:
    """Returns the kind of a setting that is one of some words, in lower case.

    `noun` describes them in the message about another word; `expected` explains them. `any_case`
    also accepts them in upper case.
    """
    listed = f"one of {', '.join(values)}"
    valid = [*values, *(value.upper() for value in values if any_case)]

    def parse(text: str) -> str:
        if text not in valid:
            raise ValueError(
                explain(f"{text!r} is not {noun}.", expected=expected or f"{listed}.", fix=_FIX)
            )
        return text.lower()

    return SettingKind(noun=listed, schema={"type": "string", "enum": valid}, parse=parse)

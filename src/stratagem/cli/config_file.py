"""Reading of the TOML file of `stratagem launch --config`, and its JSON Schema."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import click

from stratagem import environment
from stratagem.cli.commands import suggestion
from stratagem.errors import explain

# Options that say how a command runs, which a file does not.
_NOT_IN_FILES = ("config", "help", "module", "quiet", "verbose")
# Python type, its name in messages, and its JSON type or types.
FileType = tuple[Any, str, str | list[str]]
_TYPES: dict[type[Any], FileType] = {
    type(click.BOOL): (bool, "true or false", "boolean"),
    click.IntRange: (int, "an integer", "integer"),
    click.FloatRange: (int | float, "a number", "number"),
}
_TEXT: FileType = (str, "a string", "string")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileValues:
    """Values of a file by name: options of the command, and settings as text of variables."""

    options: dict[str, Any]
    settings: dict[str, str]


def key_of(name: str) -> str:
    """Returns the key of an option or setting, as on the command line."""
    return name.replace("_", "-")


def file_options(command: click.Command) -> dict[str, click.Option]:
    """Returns the options of a command that a file can set, by name."""
    return {
        str(parameter.name): parameter
        for parameter in command.params
        if isinstance(parameter, click.Option) and parameter.name not in _NOT_IN_FILES
    }


def file_settings(command: click.Command) -> dict[str, environment.EnvironmentVariable]:
    """Returns the settings of the library that a file can set, by name."""
    options = file_options(command)
    return {name: one for name, one in environment.VARIABLES.items() if name not in options}


def description_of(option: click.Option) -> str:
    """Returns the help of an option without its default."""
    return (option.help or "").partition("  [")[0]


def read_file(path: Path, command: click.Command) -> FileValues:
    """Returns the values of a file; raises ClickException for one that is invalid."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from error
    options, settings = file_options(command), file_settings(command)
    found = FileValues(options=dict[str, Any](), settings=dict[str, str]())
    names: dict[str, str] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in names:
            raise click.ClickException(_twice(path, names[name], key))
        names[name] = key
        if name in options:
            found.options[name] = _checked(path, key, value, options[name])
        elif name in settings:
            found.settings[name] = _checked_text(path, key, value, settings[name])
        else:
            raise click.ClickException(_unknown(path, key, list(options), list(settings)))
    return found


def file_schema(command: click.Command) -> dict[str, Any]:
    """Returns the JSON Schema of a file, for editors."""
    properties: dict[str, Any] = {}
    for name, option in file_options(command).items():
        properties[name] = {**_schema_of(option), "description": description_of(option)}
    for name, variable in file_settings(command).items():
        properties[name] = {**variable.parse.schema, "description": variable.meaning}
        properties[name]["default"] = variable.default
    both = {
        key: schema
        for name, schema in properties.items()
        for key in dict.fromkeys((key_of(name), name))
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of `stratagem launch --config`",
        "type": "object",
        "properties": both,
        "additionalProperties": False,
    }


def _schema_of(option: click.Option) -> dict[str, Any]:
    kind = option.type
    schema: dict[str, Any] = {"type": _type_of(option)[2]}
    if option.multiple:
        schema["items"] = {"type": "string"}
    if isinstance(kind, click.Choice):
        schema["enum"] = list(kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange) and kind.min is not None:
        schema["minimum"] = kind.min
    return schema


def _type_of(option: click.Option) -> FileType:
    """Returns the type of an option's value in a file."""
    if option.multiple:
        return list, "a list of strings", "array"
    return getattr(option.type, "file_type", None) or _TYPES.get(type(option.type), _TEXT)


def _checked(path: Path, key: str, value: object, option: click.Option) -> object:
    wanted, noun, _ = _type_of(option)
    if not isinstance(value, wanted) or isinstance(value, bool) != (wanted is bool):
        raise click.ClickException(_wrong_type(path, key, value, noun))
    return value


def _checked_text(
    path: Path, key: str, value: object, variable: environment.EnvironmentVariable
) -> str:
    text = variable.parse.text_of(value)
    if text is None:
        raise click.ClickException(_wrong_type(path, key, value, variable.parse.noun))
    try:
        variable.parse(text)
    except ValueError as error:
        raise click.ClickException(_wrong_type(path, key, value, variable.parse.noun)) from error
    return text


def _wrong_type(path: Path, key: str, value: object, noun: str) -> str:
    return explain(
        f"{path} has {key} = {value!r}, which is not {noun}.",
        expected=f"{noun}.",
        fix="correct the value.",
    )


def _unknown(path: Path, key: str, options: list[str], settings: list[str]) -> str:
    keys = [key_of(name) for name in (*options, *settings)]
    listed = ", ".join(keys[: len(options)])
    return explain(
        f"{path} has the unknown key {key!r}.{suggestion(key_of(key), keys)}",
        expected=f"keys among {listed}, or a setting such as peer-timeout-s.",
        fix="correct or remove it.",
    )


def _twice(path: Path, first: str, second: str) -> str:
    return explain(
        f"{path} has {first} and {second}, which are the same option.",
        expected="each option once.",
        fix="remove one of them.",
    )

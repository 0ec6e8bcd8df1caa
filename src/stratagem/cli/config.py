"""`stratagem config`: writes a TOML file for `stratagem launch`, and shows effective values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from stratagem import environment, settings
from stratagem.cli.commands import chosen_log_level, json_option, print_json
from stratagem.cli.launch import command as launch_command
from stratagem.cli.launch import read_file
from stratagem.settings import SETTINGS, Setting

_FILE = Path("stratagem.toml")
_ASKED = (
    "workers",
    "chief",
    "ps",
    "evaluator",
    "devices_per_worker",
    "max_restarts",
    "log_dir",
    "run_dir",
)
_HEADER = (
    "# Options of `stratagem launch --config FILE`. The command line and the environment take\n"
    "# precedence."
)
_OTHERS = "# Settings of the library, with their defaults: remove the # of a line to set it."


@dataclasses.dataclass(frozen=True, kw_only=True)
class EffectiveValue:
    """Value of an option or setting, and its source: "file ...", "environment ..." or "default"."""

    name: str
    value: object
    source: str
    variable: str


@click.command("config")
@click.option("--default", "is_default", is_flag=True, help="Write all defaults, and ask nothing.")
@click.option("--show", is_flag=True, help="Show the effective values, and their sources.")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of the file, for editors.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@json_option
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
def command(
    file: Path | None, *, is_default: bool, show: bool, schema: bool, force: bool, as_json: bool
) -> None:
    """Write a file of options for `stratagem launch --config`.

    Asks for the most frequent options, and writes them to FILE, by default stratagem.toml. With
    --show, reads FILE, by default that of STRATAGEM_CONFIG, and writes nothing.
    """
    if is_default + show + schema > 1:
        raise click.UsageError("--default, --show and --schema exclude each other.")
    if as_json and not (show or schema):
        raise click.UsageError("--json needs --show: what is written is TOML.")
    if schema:
        print_json(file_schema())
    elif show:
        show_values(list(effective_values(file)), as_json=as_json)
    else:
        _write(file or _FILE, default_text if is_default else _asked_text, force=force)


def file_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a file, for editors."""
    properties: dict[str, Any] = {}
    for setting in SETTINGS.values():
        schema = {**setting.kind.schema, "description": setting.description}
        if setting.default is not None:
            schema["default"] = setting.default
        properties |= dict.fromkeys((setting.key, setting.name), schema)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of `stratagem launch --config`",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def effective_values(file: Path | None) -> Iterator[EffectiveValue]:
    """Yields the value of each option of the launcher and each setting, as a launch would have it.

    Raises ClickException for an invalid file or variable.
    """
    arguments = [] if file is None else ["--config", str(file)]
    context = launch_command.make_context("launch", [*arguments, "script"])
    path = file or environment.lookup("STRATAGEM_CONFIG")
    written = {} if path is None else read_file(Path(path)).variables
    for setting in SETTINGS.values():
        if setting.is_option:
            value = context.params[setting.name]
            origin = context.get_parameter_source(setting.name)
        else:
            value, origin = _setting_value(setting, written.get(setting.variable))
        yield EffectiveValue(
            name=setting.key,
            value=setting.default if value is None else value,
            source={
                ParameterSource.ENVIRONMENT: f"environment {setting.variable}",
                ParameterSource.DEFAULT_MAP: f"file {path}",
            }.get(origin or ParameterSource.DEFAULT, "default"),
            variable=setting.variable,
        )


def _setting_value(setting: Setting, written: str | None) -> tuple[object, ParameterSource]:
    if environment.get(setting.variable) is None and written is not None:
        return setting.kind.parse(written), ParameterSource.DEFAULT_MAP
    try:
        value = settings.read(setting.name)
    except ValueError as error:
        raise click.ClickException(str(error)) from error
    is_set = environment.get(setting.variable) is not None
    return value, ParameterSource.ENVIRONMENT if is_set else ParameterSource.DEFAULT


def default_text() -> str:
    """Returns a TOML file with every key; settings and options without a default are comments."""
    options, others = [_HEADER, ""], [_OTHERS, ""]
    for setting in SETTINGS.values():
        description, default = f"# {setting.description}", setting.default
        if not setting.is_option:
            others += [description, f"# {setting.key} = {_toml(default)}", ""]
        elif default is None:
            options += [description, f"# {setting.key} =", ""]
        else:
            options += [description, f"{setting.key} = {_toml(default)}", ""]
    return "\n".join([*options, *others])


def show_values(values: list[EffectiveValue], *, as_json: bool) -> None:
    """Prints values as a table whose cells are shown as they are, or as JSON."""
    if as_json:
        print_json([dataclasses.asdict(one) for one in values])
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "value", "source")
    for one in values:
        table.add_row(one.name, "-" if one.value is None else _toml(one.value), one.source)
    Console(highlight=False, markup=False).print(table)


def _write(path: Path, text: Callable[[], str], *, force: bool) -> None:
    if path.exists() and not force:
        raise click.ClickException(f"{path} exists: give another file, or --force to replace it.")
    written = text()
    try:
        path.write_text(written, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}") from error
    if chosen_log_level() != "error":
        click.echo(f"Wrote {path}. Use it: stratagem launch --config {path} train.py", err=True)


def _asked_text() -> str:
    lines = [_HEADER, ""]
    for name in _ASKED:
        answer = _ask(SETTINGS[name])
        if answer is not None:
            lines.append(f"{SETTINGS[name].key} = {_toml(answer)}")
    return "\n".join([*lines, ""])


def _ask(setting: Setting) -> object:
    option = next(one for one in launch_command.params if one.name == setting.name)
    has_default = setting.default is not None

    def convert(text: object) -> object:
        return None if text == "" else option.type.convert(text, option, None)

    return click.prompt(
        setting.description.rstrip(".") + ("" if has_default else " (empty: none)"),
        default=setting.default if has_default else "",
        show_default=has_default,
        value_proc=convert,
        err=True,
    )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"
    # A JSON string is a TOML string, too.
    return json.dumps(value, ensure_ascii=False)

"""`stratagem config`: writes a TOML file for `stratagem launch`, and shows effective values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from stratagem import environment
from stratagem.cli.commands import chosen_log_level, json_option, print_json
from stratagem.cli.config_file import (
    description_of,
    file_options,
    file_schema,
    file_settings,
    key_of,
    read_file,
)
from stratagem.cli.launch import command as launch_command

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
        print_json(file_schema(launch_command))
    elif show:
        _show(list(effective_values(file)), as_json=as_json)
    else:
        _write(file or _FILE, default_text if is_default else _asked_text, force=force)


def effective_values(file: Path | None) -> Iterator[EffectiveValue]:
    """Yields the value of each option of the launcher and each setting, as a launch would have it.

    Raises ClickException for an invalid file or variable.
    """
    arguments = [] if file is None else ["--config", str(file)]
    context = launch_command.make_context("launch", [*arguments, "script"])
    path = file or environment.lookup("STRATAGEM_CONFIG")
    defaults = _launch_defaults()
    for name, option in file_options(launch_command).items():
        variable = str(option.envvar)
        source = context.get_parameter_source(name)
        value = context.params[name]
        yield EffectiveValue(
            name=key_of(name),
            value=defaults[name] if value is None else value,
            source={
                ParameterSource.ENVIRONMENT: f"environment {variable}",
                ParameterSource.DEFAULT_MAP: f"file {path}",
            }.get(source or ParameterSource.DEFAULT, "default"),
            variable=variable,
        )
    written = {} if path is None else read_file(Path(path), launch_command).settings
    for name, variable in file_settings(launch_command).items():
        yield _effective_setting(name, variable, written.get(name), f"file {path}")


def default_text() -> str:
    """Returns a TOML file with every key; settings and options without a default are comments."""
    defaults = _launch_defaults()
    lines = [_header(), ""]
    for name, option in file_options(launch_command).items():
        default = defaults[name]
        line = f"# {key_of(name)} =" if default is None else f"{key_of(name)} = {_toml(default)}"
        lines += [f"# {description_of(option)}", line, ""]
    lines += [
        "# Settings of the library, with their defaults: remove the # of a line to set it.",
        "",
    ]
    for name, variable in file_settings(launch_command).items():
        lines += [f"# {variable.meaning}", f"# {key_of(name)} = {_toml(variable.default)}", ""]
    return "\n".join(lines)


def _effective_setting(
    name: str, variable: environment.EnvironmentVariable, written: str | None, file: str
) -> EffectiveValue:
    if variable.name not in environment.snapshot() and written is not None:
        value, source = variable.parse(written), file
    else:
        try:
            value = environment.read(name)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        is_set = variable.name in environment.snapshot()
        source = f"environment {variable.name}" if is_set else "default"
    return EffectiveValue(name=key_of(name), value=value, source=source, variable=variable.name)


def _launch_defaults() -> dict[str, Any]:
    from stratagem.launch.plan.options import LaunchOptions

    defaults = {field.name: field.default for field in dataclasses.fields(LaunchOptions)}
    # An option that is also a setting has the default of the setting.
    shared = {name: one.default for name, one in environment.VARIABLES.items() if name in defaults}
    return defaults | shared


def _show(values: list[EffectiveValue], *, as_json: bool) -> None:
    if as_json:
        print_json([dataclasses.asdict(one) for one in values])
        return
    from stratagem.cli.tables import show_table

    rows = [(one.name, _shown(one.value), one.source) for one in values]
    show_table(("name", "value", "source"), rows)


def _shown(value: object) -> str:
    return "-" if value is None else _toml(value)


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
    options, defaults = file_options(launch_command), _launch_defaults()
    lines = [_header(), ""]
    for name in _ASKED:
        answer = _ask(options[name], defaults[name])
        if answer is not None:
            lines.append(f"{key_of(name)} = {_toml(answer)}")
    return "\n".join([*lines, ""])


def _ask(option: click.Option, default: object) -> object:
    question = description_of(option).rstrip(".")
    if isinstance(default, bool):
        return click.confirm(question, default=default, err=True)
    if default is not None:
        return click.prompt(question, default=default, type=option.type, err=True)

    def convert(text: str) -> object:
        return option.type.convert(text, option, None) if text else None

    return click.prompt(
        f"{question} (empty: none)", default="", show_default=False, value_proc=convert, err=True
    )


def _header() -> str:
    return (
        "# Options of `stratagem launch --config FILE`. The command line and the environment take\n"
        "# precedence."
    )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.12g}"
    # A JSON string is a TOML string, too.
    return json.dumps(value, ensure_ascii=False)

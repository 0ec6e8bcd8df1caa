"""`stratagem launch`: options from the command line, the environment and a file."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from stratagem import environment
from stratagem.cli.commands import chosen_log_level, suggestion
from stratagem.errors import explain
from stratagem.settings import (
    FILE,
    FOLDER,
    SETTINGS,
    SWITCH,
    Kind,
    Setting,
)

_VARIABLES = "stratagem.variables_of_file"
_EPILOG = """Options accept underscores instead of dashes. Each can also be set by the environment
variable shown next to it, or by its name in a TOML file. The command line takes precedence over the
environment, which takes precedence over the file."""


def _with_dashes(token: str) -> str:
    return token.replace("_", "-")


def _launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options of the table of settings, in its order."""
    for setting in reversed(SETTINGS.values()):
        if setting.is_option:
            aliases = [f"--{setting.alias}"] if setting.alias else []
            command = click.option(
                f"--{setting.key}",
                *aliases,
                setting.name,
                envvar=setting.variable,
                show_envvar=True,
                help=_help_of(setting),
                metavar=setting.metavar,
                **_attributes_of(setting.kind),
            )(command)
    return command


def _help_of(setting: Setting) -> str:
    """Returns the help of an option, with its default; a task has that of a setting anyway."""
    default = setting.unset or setting.default
    if default is None or default is False or setting.meaning:
        return setting.description
    return f"{setting.description}  [default: {str(default).removesuffix('.0')}]"


def _attributes_of(kind: Kind) -> dict[str, Any]:
    """Returns the attributes of an option for values of a kind."""
    limits = kind.limits
    if kind is SWITCH:
        return {"is_flag": True, "default": None}
    if kind in (FOLDER, FILE):
        return {"type": click.Path(file_okay=kind is FILE, dir_okay=kind is FOLDER)}
    if "enum" in limits:
        words = dict.fromkeys(word.lower() for word in limits["enum"])
        return {"type": click.Choice([*words], case_sensitive=[*words] == limits["enum"])}
    if kind.type is int:
        return {"type": click.IntRange(limits["minimum"])}
    if "minimum" in limits:
        return {"type": click.FloatRange(limits["minimum"])}
    if "exclusiveMinimum" in limits:
        return {"type": click.FloatRange(limits["exclusiveMinimum"], min_open=True)}
    return {}


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Makes the values of a file the defaults of the other options, and of settings."""
    if path is not None:
        values = read_file(path)
        context.default_map = {**(context.default_map or {}), **values.options}
        context.meta[_VARIABLES] = values.variables


@click.command(
    "launch",
    epilog=_EPILOG,
    # Arguments after the script belong to the script.
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _with_dashes},
)
@_launch_options
@click.option(
    "--config",
    type=click.Path(dir_okay=False, path_type=Path),
    envvar="STRATAGEM_CONFIG",
    show_envvar=True,
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file with options.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], *, module: bool, **options: Any) -> None:
    """Run SCRIPT as every task of a cluster.

    The cluster is on this machine or on several. Each task finds it, and its own task, in
    TF_CONFIG. When one fails, the others are
    stopped, and its last lines are shown as the cause.
    """
    from stratagem.launch import functions as scripts

    given = {name: value for name, value in options.items() if value not in (None, ())}
    context = click.get_current_context()
    is_given = context.get_parameter_source("log_level") is ParameterSource.COMMANDLINE
    if not is_given and (level := chosen_log_level(context)) is not None:
        given["log_level"] = level
    environment.set_defaults(context.meta.get(_VARIABLES, {}))
    try:
        outcome = scripts.run_script(script, args, module=module, **given)
    except BrokenPipeError:  # the reader of the output has exited; click handles this
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(outcome.exit_code)


# The TOML file of `--config`.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileValues:
    """Values of a file: options by name, and texts of the variables of settings."""

    options: dict[str, Any]
    variables: dict[str, str]


def read_file(path: Path) -> FileValues:
    """Returns the values of a file; raises ClickException for one that is invalid."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from error
    found = FileValues(options=dict[str, Any](), variables=dict[str, str]())
    keys: dict[str, str] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name in keys:
            raise click.ClickException(_twice(path, keys[name], key))
        keys[name] = key
        if name not in SETTINGS:
            raise click.ClickException(_unknown(path, key))
        setting = SETTINGS[name]
        _check(path, key, value, setting)
        if setting.is_option:
            found.options[name] = value
        else:
            found.variables[setting.variable] = _text_of(value)
    return found


def _text_of(value: object) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


def _check(path: Path, key: str, value: object, setting: Setting) -> None:
    kind = setting.kind
    # Click checks the limits of an option, wherever its value comes from.
    noun = kind.type_noun if setting.is_option else kind.noun
    try:
        if not kind.has_type(value):
            raise ValueError(value)
        if not setting.is_option:
            kind.parse(_text_of(value))
    except ValueError as error:
        raise click.ClickException(
            explain(
                f"{path} has {key} = {value!r}, which is not {noun}.",
                expected=f"{noun}.",
                fix="correct the value.",
            )
        ) from error


def _unknown(path: Path, key: str) -> str:
    keys = [setting.key for setting in SETTINGS.values()]
    listed = ", ".join(setting.key for setting in SETTINGS.values() if setting.is_option)
    return explain(
        f"{path} has the unknown key {key!r}.{suggestion(key.replace('_', '-'), keys)}",
        expected=f"keys among {listed}, or a setting such as peer-timeout-s.",
        fix="correct or remove it.",
    )


def _twice(path: Path, first: str, second: str) -> str:
    return explain(
        f"{path} has {first} and {second}, which are the same option.",
        expected="each option once.",
        fix="remove one of them.",
    )

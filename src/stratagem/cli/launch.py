"""`stratagem launch`: options from the command line and the environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.core import ParameterSource

from stratagem.cli.commands import chosen_log_level
from stratagem.settings import FILE, FOLDER, SETTINGS, SWITCH, Kind, Setting

_EPILOG = """Options accept underscores instead of dashes. Each can also be set by the environment
variable shown next to it; the command line takes precedence."""


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


@click.command(
    "launch",
    epilog=_EPILOG,
    # Arguments after the script belong to the script.
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _with_dashes},
)
@_launch_options
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
    try:
        outcome = scripts.run_script(script, args, module=module, **given)
    except BrokenPipeError:  # the reader of the output has exited; click handles this
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(outcome.exit_code)

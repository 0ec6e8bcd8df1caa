"""`stratagem launch`: its options, from the command line, the environment and a file.

The launcher itself is loaded when the command is called.
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from stratagem.messages import explain

__all__ = ["command"]

_EPILOG = """Every option can be written with underscores for dashes, set by the environment
variable shown beside it, or stand under its name in a TOML file. The command line wins over the
environment, and that over the file."""


def _with_dashes(token: str) -> str:
    return token.replace("_", "-")


def _option(name: str, **attributes: Any) -> Callable[[Any], Any]:
    variable = f"STRATAGEM_{name.upper()}"
    flag = f"--{_with_dashes(name)}"
    return click.option(flag, name, envvar=variable, show_envvar=True, **attributes)


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Makes the values of a file the defaults of the other options."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{path} cannot be read: {error}") from error
    options = {
        str(parameter.name): parameter
        for parameter in context.command.params
        if isinstance(parameter, click.Option) and parameter.name not in ("config", "module")
    }
    context.default_map = {
        **(context.default_map or {}),
        **{_checked(path, key, value, options): value for key, value in values.items()},
    }


def _checked(path: Path, key: str, value: Any, options: Mapping[str, click.Option]) -> str:
    """The option that a key of the file sets, if its value can be one."""
    name = key.replace("-", "_")
    if name not in options:
        raise click.ClickException(
            explain(
                f"{path} has the key {key!r}.",
                expected=f"keys among {', '.join(map(_with_dashes, options))}.",
                fix="correct or remove it.",
            )
        )
    wanted = _TYPES.get(type(options[name].type), (str, "a text"))
    if not isinstance(value, wanted[0]) or isinstance(value, bool) != (wanted[0] is bool):
        raise click.ClickException(
            explain(
                f"{path} has {key} = {value!r}.",
                expected=f"{wanted[1]}.",
                fix="correct it.",
            )
        )
    return name


_TYPES: dict[type[Any], tuple[Any, str]] = {
    type(click.BOOL): (bool, "true or false"),
    click.IntRange: (int, "a whole number"),
    click.FloatRange: (int | float, "a number"),
}


@click.command(
    "launch",
    epilog=_EPILOG,
    # What follows the script is the script's.
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _with_dashes},
)
@_option("workers", type=click.IntRange(0), help="Number of workers.  [default: 1]")
@_option("chief", is_flag=True, default=None, help="A chief beside the workers.")
@_option("ps", type=click.IntRange(0), help="Number of parameter servers.  [default: 0]")
@_option("evaluator", is_flag=True, default=None, help="An evaluator.")
@_option(
    "devices_per_worker",
    type=click.IntRange(1),
    help="GPUs of each worker, or virtual CPU devices where there is no GPU.  "
    "[default: the GPUs shared evenly]",
)
@_option(
    "max_restarts",
    type=click.IntRange(0),
    help="How often all tasks are started again after a failure.  [default: 0]",
)
@_option(
    "min_workers",
    type=click.IntRange(1),
    help="After the failure of a worker go on without it, with as many at least.",
)
@_option(
    "max_workers",
    type=click.IntRange(1),
    help="Number of workers when all are back; --workers without it.",
)
@_option(
    "rejoin_after_s",
    type=click.FloatRange(0),
    help="Seconds that fewer workers go on, before all start again.  [default: 60]",
)
@_option(
    "cold_restarts",
    is_flag=True,
    default=None,
    help="Load JAX and Keras anew in each restarted task, instead of forking it.",
)
@_option("log_dir", type=click.Path(file_okay=False), help="Folder for a file a task.")
@_option(
    "run_dir",
    type=click.Path(file_okay=False),
    help="Folder for the events of the run, for `stratagem goodput`.",
)
@_option(
    "show",
    type=click.Choice(["all", "leader"]),
    help="Whose output is shown here.  [default: all]",
)
@_option(
    "grace_s",
    type=click.FloatRange(0),
    help="Seconds that a task may take to end before it is killed.  [default: 10]",
)
@_option(
    "evaluator_grace_s",
    type=click.FloatRange(0),
    help="Seconds that the evaluator may go on without the workers.  [default: 60]",
)
@_option(
    "config",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="A TOML file with options.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], *, module: bool, **options: Any) -> None:
    """Run SCRIPT as every task of a cluster on this machine.

    Each task finds the cluster and its own place in it in TF_CONFIG. When one fails, the others
    are stopped, and its last lines are shown as the cause.
    """
    given = {name: value for name, value in options.items() if value is not None}
    scripts = importlib.import_module("stratagem.launch.scripts")
    try:
        outcome = scripts.run_script(script, args, module=module, **given)
    except BrokenPipeError:  # whoever read the output has gone, and click knows what to do
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(outcome.exit_code)

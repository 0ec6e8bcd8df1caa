"""`stratagem launch`: options from the command line, the environment and a file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from stratagem.messages import explain

__all__ = ["command"]

_EPILOG = """Options accept underscores instead of dashes. Each can also be set by the environment
variable shown next to it, or by its name in a TOML file. The command line takes precedence over the
environment, which takes precedence over the file."""


def _with_dashes(token: str) -> str:
    return token.replace("_", "-")


def _option(name: str, *more_flags: str, **attributes: Any) -> Callable[[Any], Any]:
    variable = f"STRATAGEM_{name.upper()}"
    flags = (f"--{_with_dashes(name)}", *more_flags)
    return click.option(*flags, name, envvar=variable, show_envvar=True, **attributes)


class _NumNodes(click.ParamType[str]):
    """A number of nodes, or MIN:MAX."""

    name = "N|MIN:MAX"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Returns a valid text unchanged."""
        from stratagem.launch.plan.node_tasks import node_range

        try:
            node_range(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


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


def _checked(path: Path, key: str, value: object, options: Mapping[str, click.Option]) -> str:
    """Returns the option that a key of the file sets, if its value is valid."""
    name = key.replace("-", "_")
    if name not in options:
        raise click.ClickException(
            explain(
                f"{path} has the unknown key {key!r}.",
                expected=f"keys among {', '.join(map(_with_dashes, options))}.",
                fix="correct or remove it.",
            )
        )
    wanted = _TYPES.get(type(options[name].type), (str, "a string"))
    wanted = (list, "a list of strings") if options[name].multiple else wanted
    if not isinstance(value, wanted[0]) or isinstance(value, bool) != (wanted[0] is bool):
        raise click.ClickException(
            explain(
                f"{path} has {key} = {value!r}, which is not {wanted[1]}.",
                expected=f"{wanted[1]}.",
                fix="correct the value.",
            )
        )
    return name


_TYPES: dict[type[Any], tuple[Any, str]] = {
    type(click.BOOL): (bool, "true or false"),
    click.IntRange: (int, "an integer"),
    click.FloatRange: (int | float, "a number"),
    _NumNodes: (int | str, "a number or a string"),
}


@click.command(
    "launch",
    epilog=_EPILOG,
    # Arguments after the script belong to the script.
    context_settings={"allow_interspersed_args": False, "token_normalize_func": _with_dashes},
)
@_option(
    "workers",
    "--nproc-per-node",
    type=click.IntRange(0),
    help="Number of workers, of each node if there are several.  [default: 1]",
)
@_option("chief", is_flag=True, default=None, help="Add a chief.")
@_option("ps", type=click.IntRange(0), help="Number of parameter servers.  [default: 0]")
@_option("evaluator", is_flag=True, default=None, help="Add an evaluator.")
@_option(
    "devices_per_worker",
    type=click.IntRange(1),
    help="GPUs per worker, or virtual CPU devices if there is no GPU.  "
    "[default: the GPUs shared evenly]",
)
@_option(
    "max_restarts",
    type=click.IntRange(0),
    help="Maximum number of restarts of all tasks after a failure.  [default: 0]",
)
@_option(
    "min_workers",
    type=click.IntRange(1),
    help="After a worker fails, continue without it, with at least this many workers.",
)
@_option(
    "max_workers",
    type=click.IntRange(1),
    help="Number of workers once all are back; by default --workers.",
)
@_option(
    "rejoin_after_s",
    type=click.FloatRange(0),
    help="Seconds that fewer workers run before all restart.  [default: 60]",
)
@_option(
    "cold_restarts",
    is_flag=True,
    default=None,
    help="Load JAX and Keras again in each restarted task, instead of forking it.",
)
@_option("log_dir", type=click.Path(file_okay=False), help="Folder for one log file per task.")
@_option(
    "run_dir",
    type=click.Path(file_okay=False),
    help="Folder for the run's events, for `stratagem goodput`.",
)
@_option(
    "show",
    type=click.Choice(["all", "leader"]),
    help="Tasks whose output is shown here.  [default: all]",
)
@_option(
    "grace_s",
    type=click.FloatRange(0),
    help="Seconds that a task may take to exit before it is killed.  [default: 10]",
)
@_option(
    "evaluator_grace_s",
    type=click.FloatRange(0),
    help="Seconds that the evaluator may run after the workers end.  [default: 60]",
)
@_option(
    "nnodes",
    type=_NumNodes(),
    help="Number of nodes (machines), each of which runs this command; MIN:MAX continues without "
    "lost ones. By default 1, or the nodes of a Slurm step.",
)
@_option(
    "node_rank",
    type=click.IntRange(0),
    help="Rank of this node. Node 0 starts and watches all tasks.",
)
@_option("rdzv_endpoint", metavar="HOST:PORT", help="Address of node 0, where the nodes meet.")
@_option(
    "node_timeout_s",
    type=click.FloatRange(0, min_open=True),
    help="Seconds without an answer after which a node is lost.  [default: 15]",
)
@_option("hosts", metavar="A,B,C", help="Hosts on which `ssh` starts this command.")
@_option(
    "hostfile",
    type=click.Path(dir_okay=False),
    help="File with one host per line, optionally with slots=N for its workers.",
)
@_option("ssh_options", help="Options of the `ssh` program, as in a shell.")
@_option(
    "env",
    metavar="NAME[=VALUE]",
    multiple=True,
    help="Variable for all hosts. May be repeated.",
)
@_option(
    "config",
    type=click.Path(dir_okay=False, path_type=Path),
    is_eager=True,
    expose_value=False,
    callback=_read_config,
    help="TOML file with options.",
)
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module, as in `python -m`.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(script: str, args: tuple[str, ...], *, module: bool, **options: Any) -> None:
    """Run SCRIPT as every task of a cluster, on this machine or on several.

    Each task finds the cluster and its own task in TF_CONFIG. When one fails, the others are
    stopped, and its last lines are shown as the cause.
    """
    from stratagem.launch import scripts

    given = {name: value for name, value in options.items() if value not in (None, ())}
    try:
        outcome = scripts.run_script(script, args, module=module, **given)
    except BrokenPipeError:  # the reader of the output has exited; click handles this
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(outcome.exit_code)

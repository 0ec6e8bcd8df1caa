"""`stratagem launch`: options from the command line, the environment and a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from stratagem import environment
from stratagem.cli.commands import chosen_log_level
from stratagem.cli.config_file import FileType, read_file
from stratagem.environment import LOG_LEVELS

# Not generic before click 8.2.
if TYPE_CHECKING:
    _TextType = click.ParamType[str]
else:
    _TextType = click.ParamType

_SETTINGS = "stratagem.file_settings"
_EPILOG = """Options accept underscores instead of dashes. Each can also be set by the environment
variable shown next to it, or by its name in a TOML file. The command line takes precedence over the
environment, which takes precedence over the file."""


def _with_dashes(token: str) -> str:
    return token.replace("_", "-")


def _option(name: str, *more_flags: str, **attributes: Any) -> Callable[[Any], Any]:
    variable = f"STRATAGEM_{name.upper()}"
    flags = (f"--{_with_dashes(name)}", *more_flags)
    return click.option(*flags, name, envvar=variable, show_envvar=True, **attributes)


class _NumNodes(_TextType):
    """A number of nodes, or MIN:MAX."""

    name = "N|MIN:MAX"
    file_type: FileType = (int | str, "a number or a string", ["integer", "string"])

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> str:
        """Returns a valid text unchanged."""
        from stratagem.launch.plan.options import node_range

        try:
            node_range(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


def _read_config(context: click.Context, _: click.Parameter, path: Path | None) -> None:
    """Makes the values of a file the defaults of the other options, and of settings."""
    if path is not None:
        values = read_file(path, context.command)
        context.default_map = {**(context.default_map or {}), **values.options}
        context.meta[_SETTINGS] = values.settings


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
    "input_workers",
    type=click.IntRange(0),
    help="Number of input workers, which read datasets for all tasks.  [default: 0]",
)
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
@_option(
    "survivors",
    is_flag=True,
    default=None,
    help="Leave the other workers running if one fails, as ElasticStrategy needs it.",
)
@_option(
    "spares",
    type=click.IntRange(0),
    help="Further workers, which wait to take the place of a lost one.  [default: 0]",
)
@_option(
    "evict_slow",
    type=click.FloatRange(1, min_open=True),
    metavar="FACTOR",
    help="End a worker that makes steps take FACTOR times as long, if the others can continue.",
)
@_option(
    "evict_after_s",
    type=click.FloatRange(0),
    help="Seconds for which a worker must be that slow.  [default: 60]",
)
@_option(
    "max_evictions",
    type=click.IntRange(0),
    help="Maximum number of workers to end for being slow.  [default: 1]",
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
    "log_level",
    type=click.Choice(LOG_LEVELS, case_sensitive=False),
    help="Lowest level of log records that tasks show.",
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
    environment.set_defaults(
        {
            environment.VARIABLES[name].name: text
            for name, text in context.meta.get(_SETTINGS, {}).items()
        }
    )
    try:
        outcome = scripts.run_script(script, args, module=module, **given)
    except BrokenPipeError:  # the reader of the output has exited; click handles this
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    raise SystemExit(outcome.exit_code)

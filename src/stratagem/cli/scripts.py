"""Commands that run a script: `stratagem launch` and `stratagem plan`."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from stratagem import environment
from stratagem.cli.commands import chosen_log_level, json_option, print_json
from stratagem.settings import FILE, FOLDER, SETTINGS, SWITCH, Kind, Setting

if TYPE_CHECKING:
    from stratagem.planning.choices import PlanSearch
    from stratagem.planning.result import Plan

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
def launch_command(script: str, args: tuple[str, ...], *, module: bool, **options: Any) -> None:
    """Run SCRIPT as every task of a cluster.

    The cluster is on this machine or on several. Each task finds it, and its own task, in
    TF_CONFIG. When one fails, the others are stopped, and its last lines are shown as the cause.
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


# `stratagem plan`: memory, step time and scaling of a script on hardware you don't have.


_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.option(
    "--target", required=True, help='Machine: "8xH100", "64xH100", "v5e:4x4", "2xv5e:4x4".'
)
@click.option(
    "--global-batch", type=int, help="Examples over all devices; by default the script's."
)
@click.option(
    "--shard-state",
    type=click.Choice(["optimizer", "all"]),
    help="State to shard over replicas (ZeRO-1, or FSDP); by default the script's choice.",
)
@click.option(
    "--shard-size", type=click.IntRange(min=1), help="Replicas that store one copy of that state."
)
@click.option(
    "--search",
    "num_results",
    type=click.IntRange(min=1),
    help="Print the best N meshes, sharded states, rematerializations and precisions.",
)
@json_option
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the JSON to a file.",
)
@click.option("--link-bytes-per-s", type=_POSITIVE, help="Bandwidth of a device inside a host.")
@click.option("--link-latency-s", type=_POSITIVE, help="Latency inside a host.")
@click.option("--network-bytes-per-s", type=_POSITIVE, help="Bandwidth of a device between hosts.")
@click.option("--network-latency-s", type=_POSITIVE, help="Latency between hosts.")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan_command(
    script: Path,
    arguments: tuple[str, ...],
    target: str,
    global_batch: int | None,
    shard_state: str | None,
    shard_size: int | None,
    num_results: int | None,
    output: Path | None,
    *,
    as_json: bool,
    **links: float | None,
) -> None:
    """Plan a training step of SCRIPT for hardware you don't have.

    The script runs unmodified up to its first training step, with as many replicas as the target
    has devices. Nothing is trained, and its variables take no memory. Options not listed below, and
    everything after "--", are passed to the script. What it prints goes to stderr.
    """
    # Leave the accelerators of this machine to other programs.
    environment.set_defaults({"JAX_PLATFORMS": "cpu"})
    given = {name: value for name, value in links.items() if value is not None}
    found: Plan | PlanSearch
    show: Callable[[], None]
    try:
        environment.require_jax_choice()
        from stratagem.planning.candidates import assumptions_of
        from stratagem.planning.captured_steps import capture_script, with_global_batch
        from stratagem.planning.choices import show_search
        from stratagem.planning.planner import plan_step
        from stratagem.planning.result import show_plan
        from stratagem.planning.search import search_step
        from stratagem.planning.step_time import Assumptions
        from stratagem.planning.targets import parse_target

        machine = parse_target(target)
        step = capture_script(script, arguments, machine, shard_state, shard_size)
        note = "The batch is the script's first one, split over the devices."
        if global_batch is not None:
            step = with_global_batch(step, global_batch)
            note = f"The batch of {global_batch} replaces the script's."
        if num_results is None:
            assumed = Assumptions(**given)
            found = plan_step(step, machine, title=script.name, notes=(note,), assumptions=assumed)
            show = functools.partial(show_plan, found)
        else:
            assumed = assumptions_of(machine, **given)
            found = search_step(
                step, machine, title=script.name, count=num_results, assumptions=assumed
            )
            show = functools.partial(show_search, found)
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(json.dumps(found.to_dict(), indent=2) + "\n")
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print_json(found.to_dict())
    else:
        show()

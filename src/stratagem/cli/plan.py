"""`stratagem plan`: what a script's training step takes on a machine that is not here.

What traces, compiles and draws is loaded when the command is called.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import click

from stratagem import environment

__all__ = ["command"]


@click.command("plan", context_settings={"ignore_unknown_options": True})
@click.option(
    "--target", required=True, help='The machine: "8xH100", "64xH100", "v5e:4x4", "2xv5e:4x4".'
)
@click.option(
    "--global-batch", type=int, help="Examples of all devices together; the script's if not given."
)
@click.option(
    "--shard-state",
    type=click.Choice(["optimizer", "all"]),
    help="What devices have a part of each and no copies; what the script says if not given.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write it as JSON, too.")
@click.option(
    "--picture", type=click.Path(dir_okay=False, path_type=Path), help="Draw it, too: FILE.png."
)
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    script: Path,
    arguments: tuple[str, ...],
    target: str,
    global_batch: int | None,
    shard_state: str | None,
    json_file: Path | None,
    picture: Path | None,
) -> None:
    """Plan a training step of SCRIPT for a machine that is not here.

    The script runs unmodified until its first training step, with as many replicas as the machine
    has devices. Nothing is trained, and its variables take no memory. Options that are not those
    below are the script's; behind "--" all are.
    """
    # The machine that is planned for is not this one, whose accelerators others may need.
    environment.set_defaults({"JAX_PLATFORMS": "cpu"})
    try:
        environment.require_jax_choice()
        plan = _planned(script, arguments, target, global_batch, shard_state)
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps(plan.to_dict(), indent=2) + "\n")
        if picture is not None:
            importlib.import_module("stratagem.planning.plot").draw(plan, picture)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    console = importlib.import_module("rich.console").Console(highlight=False)
    importlib.import_module("stratagem.planning.report").show(plan, console)


def _planned(
    script: Path,
    arguments: tuple[str, ...],
    target: str,
    global_batch: int | None,
    shard_state: str | None,
) -> Any:
    planning = importlib.import_module("stratagem.planning")
    machine = planning.parse_target(target)
    step = planning.capture_script(script, arguments, machine, shard_state)
    note = "The batch is that of the script's first step, divided by the devices."
    if global_batch is not None:
        step = planning.with_global_batch(step, global_batch)
        note = "The batch is another than the script's, divided by the devices."
    return planning.plan_step(step, machine, title=script.name, notes=(note,))

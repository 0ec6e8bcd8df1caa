"""`stratagem plan`: memory, step time and scaling of a script on hardware you don't have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stratagem import environment
from stratagem.cli.commands import json_option, print_json

if TYPE_CHECKING:
    from stratagem.execution.tracing.functionalize import CapturedStep
    from stratagem.planning.result import Plan


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
def command(
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
    try:
        environment.require_jax_choice()
        from stratagem.planning.result import show_plan

        step = _captured(script, arguments, target, global_batch, shard_state, shard_size)
        if num_results is not None:
            _search(step, script.name, target, num_results, links, output, as_json=as_json)
            return
        plan = _make_plan(step, script, target, global_batch, links)
        _write(output, plan.to_dict())
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    if as_json:
        print_json(plan.to_dict())
        return
    show_plan(plan)


def _write(output: Path | None, fields: object) -> None:
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(fields, indent=2) + "\n")


def _captured(
    script: Path,
    arguments: tuple[str, ...],
    target: str,
    global_batch: int | None,
    shard_state: str | None,
    shard_size: int | None,
) -> CapturedStep:
    from stratagem import planning

    machine = planning.parse_target(target)
    step = planning.capture_script(script, arguments, machine, shard_state, shard_size)
    return step if global_batch is None else planning.with_global_batch(step, global_batch)


def _search(
    step: CapturedStep,
    title: str,
    target: str,
    num_results: int,
    links: dict[str, float | None],
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from stratagem import planning
    from stratagem.planning.choices import show_search

    machine = planning.parse_target(target)
    assumed = planning.assumptions_of(machine, **_given(links))
    found = planning.search_step(step, machine, title=title, count=num_results, assumptions=assumed)
    _write(output, found.to_dict())
    if as_json:
        print_json(found.to_dict())
        return
    show_search(found)


def _make_plan(
    step: CapturedStep,
    script: Path,
    target: str,
    global_batch: int | None,
    links: dict[str, float | None],
) -> Plan:
    from stratagem import planning

    machine = planning.parse_target(target)
    note = "The batch is the script's first one, split over the devices."
    if global_batch is not None:
        note = f"The batch of {global_batch} replaces the script's."
    assumed = planning.Assumptions(**_given(links))
    return planning.plan_step(step, machine, title=script.name, notes=(note,), assumptions=assumed)


def _given(links: dict[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in links.items() if value is not None}

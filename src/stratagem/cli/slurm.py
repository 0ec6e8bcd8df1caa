"""`stratagem slurm`: rendering of batch scripts."""

from __future__ import annotations

from typing import IO

import click

from stratagem.cli.commands import Commands
from stratagem.cli.templates import (
    assignments_option,
    errors_as_messages,
    overrides,
    template_argument,
    template_arguments,
)


@click.group("slurm", cls=Commands)
def slurm_group() -> None:
    """Render batch scripts for Slurm."""


@slurm_group.command()
@template_argument
@click.option("--name", help="Job name.")
@click.option("--workers", "worker_replicas", type=int, help="Number of workers (Slurm tasks).")
@click.option("--ps", "ps_replicas", type=int, help="Number of parameter servers.")
@click.option(
    "--heterogeneous/--homogeneous",
    default=None,
    help="Servers on nodes of their own, without GPUs, by a heterogeneous job.",
)
@click.option("--nodes", type=int, help="Number of nodes; sets the workers, or vice versa.")
@click.option("--tasks-per-node", type=int, help="Tasks per node.")
@click.option("--gpus-per-worker", "num_gpus_per_worker", type=int, help="GPUs per worker.")
@click.option("--partition", help="Slurm partition.")
@click.option("--time", help="Time limit in Slurm's format, such as 12:00:00.")
@click.option("--array", help="Indices of an array of jobs, such as 0-7%2.")
@click.option("--script", help="Script that every worker runs, or the coordinator.")
@click.option("--args", "cmdline_args", help="Script arguments in one string, shell-quoted.")
@assignments_option
def render(
    template: IO[str] | None, nodes: int | None, assignments: tuple[str, ...], **flags: object
) -> None:
    """Print a script for `sbatch`.

    TEMPLATE is an edited copy of the output of `stratagem slurm template`, or "-" for standard
    input; by default the packaged template.
    """
    from stratagem.cli.manifests.rendering import render_slurm

    with errors_as_messages():
        text = render_slurm(
            overrides(flags, assignments), nodes=nodes, **template_arguments(template)
        )
    click.echo(text, nl=False)


@slurm_group.command()
def template() -> None:
    """Print the packaged template, for editing."""
    from stratagem.cli.manifests.rendering import slurm_template

    click.echo(slurm_template(), nl=False)

"""`stratagem slurm`: batch scripts of a training job."""

from __future__ import annotations

from typing import IO

import click

from stratagem.cli.templates import (
    assignments_option,
    content,
    manifests,
    overrides,
    reported,
    template_argument,
)

__all__ = ["slurm_group"]


@click.group("slurm")
def slurm_group() -> None:
    """Batch scripts for Slurm: render them."""


@slurm_group.command()
@template_argument
@click.option("--name", help="The job's name.")
@click.option("--workers", "worker_replicas", type=int, help="Number of workers: tasks of Slurm.")
@click.option("--nodes", type=int, help="Number of nodes; it decides the workers, or vice versa.")
@click.option("--tasks-per-node", type=int, help="Workers of a node.")
@click.option("--gpus-per-worker", "num_gpus_per_worker", type=int, help="GPUs of each worker.")
@click.option("--partition", help="Where it runs.")
@click.option("--time", help="Its time limit, as Slurm writes it: 12:00:00.")
@click.option("--script", help="The script that every worker runs.")
@click.option("--args", "cmdline_args", help="Its arguments in one text, quoted as in a shell.")
@assignments_option
def render(
    template: IO[str] | None, nodes: int | None, assignments: tuple[str, ...], **flags: object
) -> None:
    """Print a script for `sbatch`.

    TEMPLATE is an edited copy of what `stratagem slurm template` prints, or "-"; without it the
    packaged one is rendered.
    """
    with reported():
        text = manifests().render_slurm(
            overrides(flags, assignments), nodes=nodes, **content(template)
        )
    click.echo(text, nl=False)


@slurm_group.command()
def template() -> None:
    """Print the packaged template, to edit its head."""
    click.echo(manifests().slurm_template(), nl=False)

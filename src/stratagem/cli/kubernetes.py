"""`stratagem kubernetes`: rendering of manifests."""

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

_ray_option = click.option(
    "--ray",
    is_flag=True,
    help="Use a KubeRay cluster that runs programs of remote clients, or --script.",
)


@click.group("kubernetes", cls=Commands)
def kubernetes_group() -> None:
    """Render manifests for Kubernetes."""


@kubernetes_group.command()
@template_argument
@click.option("--name", help="Prefix of all resource names.")
@click.option("--image", help="Container image of every task.")
@click.option("--workers", "worker_replicas", type=int, help="Number of workers.")
@click.option("--ps", "ps_replicas", type=int, help="Number of parameter servers.")
@click.option("--input-workers", "input_replicas", type=int, help="Number of input workers.")
@click.option("--gpus-per-worker", "num_gpus_per_worker", type=int, help="GPUs per worker.")
@click.option("--evaluator/--no-evaluator", "has_eval", default=None, help="Add an evaluator.")
@click.option(
    "--tensorboard/--no-tensorboard", "has_tensorboard", default=None, help="Add TensorBoard."
)
@click.option("--script", help="Path of the script in the image.")
@click.option("--args", "cmdline_args", help="Script arguments in one string, shell-quoted.")
@click.option(
    "--workload",
    type=click.Choice(["Job", "JobSet", "TrainJob"]),
    help="One Job per role, or a JobSet or Kubeflow TrainJob for all of them.",
)
@click.option("--queue", help="Kueue's LocalQueue that admits the run.")
@click.option("--port", type=int, help="Port of every task; with --ray, the port for jobs.")
@_ray_option
@assignments_option
def render(
    template: IO[str] | None, assignments: tuple[str, ...], *, ray: bool, **flags: object
) -> None:
    """Print manifests for `kubectl create -f -`.

    TEMPLATE is an edited copy of the output of `stratagem kubernetes template`, or "-" for standard
    input; by default the packaged template.
    """
    from stratagem.cli.manifests.rendering import render_kubernetes, render_ray

    with errors_as_messages():
        render_form = render_ray if ray else render_kubernetes
        text = render_form(overrides(flags, assignments), **template_arguments(template))
    click.echo(text, nl=False)


@kubernetes_group.command()
@_ray_option
def template(*, ray: bool) -> None:
    """Print the packaged template, for editing."""
    from stratagem.cli.manifests.rendering import kubernetes_template, ray_template

    text = ray_template() if ray else kubernetes_template()
    click.echo(text, nl=False)

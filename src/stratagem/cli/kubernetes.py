"""`stratagem kubernetes`: manifests of a training cluster, rendered and checked."""

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

__all__ = ["kubernetes_group"]


_ray_option = click.option(
    "--ray", is_flag=True, help="A Ray cluster of the KubeRay operator, for programs of clients."
)


@click.group("kubernetes")
def kubernetes_group() -> None:
    """Manifests for Kubernetes: render and check them."""


@kubernetes_group.command()
@template_argument
@click.option("--name", help="Begins the name of everything.")
@click.option("--image", help="The image that every task runs.")
@click.option("--workers", "worker_replicas", type=int, help="Number of workers.")
@click.option("--ps", "ps_replicas", type=int, help="Number of parameter servers.")
@click.option("--gpus-per-worker", "num_gpus_per_worker", type=int, help="GPUs of each worker.")
@click.option("--evaluator/--no-evaluator", "has_eval", default=None, help="An evaluator.")
@click.option(
    "--tensorboard/--no-tensorboard", "has_tensorboard", default=None, help="TensorBoard."
)
@click.option("--script", help="The script in the image.")
@click.option("--args", "cmdline_args", help="Its arguments in one text, quoted as in a shell.")
@click.option("--port", type=int, help="The port of every task; with --ray, the one for jobs.")
@_ray_option
@assignments_option
def render(
    template: IO[str] | None, assignments: tuple[str, ...], *, ray: bool, **flags: object
) -> None:
    """Print manifests for `kubectl create -f -`.

    TEMPLATE is an edited copy of what `stratagem kubernetes template` prints, or "-"; without it
    the packaged one is rendered.
    """
    with reported():
        render_form = manifests().render_ray if ray else manifests().render_kubernetes
        text = render_form(overrides(flags, assignments), **content(template))
    click.echo(text, nl=False)


@kubernetes_group.command()
@_ray_option
def template(*, ray: bool) -> None:
    """Print the packaged template, to edit its head."""
    text = manifests().ray_template() if ray else manifests().kubernetes_template()
    click.echo(text, nl=False)


@kubernetes_group.command()
@click.argument("file", metavar="[FILE]", default="-", type=click.File(encoding="utf-8"))
@click.option("--kubernetes-version", help="Such as 1.33; without it the newest that is known.")
def validate(file: IO[str], kubernetes_version: str | None) -> None:
    """Check manifests offline: schemas, names and TF_CONFIG.

    FILE is what `stratagem kubernetes render` prints; "-", or none, is standard input. The exit
    code is 1 if something is wrong.
    """
    with reported():
        version = kubernetes_version or manifests().kubernetes_versions()[-1]
        problems = manifests().validate_kubernetes(file.read(), version)
    for problem in problems:
        click.echo(problem)
    if problems:
        raise SystemExit(1)
    click.echo(f"Valid for Kubernetes {version}.")

"""`stratagem kubernetes`: rendering and validation of manifests."""

from __future__ import annotations

import dataclasses
from typing import IO

import click

from stratagem import errors as exit_codes
from stratagem.cli.commands import Commands, json_option, print_json
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
    """Render and validate manifests for Kubernetes."""


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
    from stratagem.cli.manifests.kubernetes import render_kubernetes
    from stratagem.cli.manifests.variable_rules import render_ray

    with errors_as_messages():
        render_form = render_ray if ray else render_kubernetes
        text = render_form(overrides(flags, assignments), **template_arguments(template))
    click.echo(text, nl=False)


@kubernetes_group.command()
@_ray_option
def template(*, ray: bool) -> None:
    """Print the packaged template, for editing."""
    from stratagem.cli.manifests.kubernetes import kubernetes_template
    from stratagem.cli.manifests.variable_rules import ray_template

    text = ray_template() if ray else kubernetes_template()
    click.echo(text, nl=False)


@kubernetes_group.command()
@click.argument("file", metavar="[FILE]", default="-", type=click.File(encoding="utf-8"))
@click.option("--kubernetes-version", help="Such as 1.33; by default the newest installed.")
@click.option(
    "--crds",
    type=click.File(encoding="utf-8"),
    multiple=True,
    help="Definitions of custom resources, as from `kubectl get crd -o yaml`; repeatable.",
)
@json_option
def validate(
    file: IO[str], kubernetes_version: str | None, crds: tuple[IO[str], ...], *, as_json: bool
) -> None:
    """Validate manifests offline: schemas, names and TF_CONFIG.

    FILE is the output of `stratagem kubernetes render`, by default standard input. Exits with code
    1 if there are problems.
    """
    from stratagem.cli.manifests.custom_resources import read_definitions
    from stratagem.cli.manifests.kubernetes import (
        kubernetes_versions,
        unchecked_rules,
        validate_kubernetes,
    )

    with errors_as_messages():
        version = kubernetes_version or kubernetes_versions()[-1]
        text = file.read()
        custom = read_definitions("\n---\n".join(one.read() for one in crds))
        problems = validate_kubernetes(text, version, custom)
        unchecked = [] if problems else unchecked_rules(text, custom)
    if as_json:
        print_json(
            {
                "kubernetes_version": version,
                "problems": [dataclasses.asdict(one) for one in problems],
                "unchecked_rules": [dataclasses.asdict(one) for one in unchecked],
            }
        )
    else:
        click.echo("\n".join(map(str, problems)) or f"Valid for Kubernetes {version}.")
        for rule in unchecked:
            click.echo(f"Not checked, a rule in CEL: {rule}")
    if problems:
        raise SystemExit(exit_codes.FAILURE)

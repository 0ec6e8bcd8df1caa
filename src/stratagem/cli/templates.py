"""`stratagem kubernetes` and `stratagem slurm`: rendering of manifests and batch scripts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping
from typing import IO, Any

import click

from stratagem.cli.commands import Commands


def template_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the argument for a custom template."""
    return click.argument("template", required=False, type=click.File(encoding="utf-8"))(command)


def assignments_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds `--set`, which sets any variable of the template."""
    return click.option(
        "--set",
        "assignments",
        metavar="NAME=VALUE",
        multiple=True,
        help="Set any variable of the template; repeatable.",
    )(command)


def overrides(
    flags: Mapping[str, object | None], assignments: tuple[str, ...]
) -> dict[str, object]:
    """Merges flags and `--set` assignments such as "port=6000" into values by variable.

    A flag of None was not given. The last assignment of a variable wins. Raises UsageError for an
    assignment without "=", or a variable set both ways.
    """
    values: dict[str, object] = {}
    for assignment in assignments:
        variable, sign, text = assignment.partition("=")
        if not sign:
            raise click.UsageError(f"--set {assignment}: expected NAME=VALUE.")
        values[variable.strip()] = text
    given = {variable: value for variable, value in flags.items() if value is not None}
    twice = sorted(values.keys() & given.keys())
    if twice:
        raise click.UsageError(f"{twice[0]} is set by --set and by its flag: omit one of them.")
    return values | given


def template_arguments(template: IO[str] | None) -> dict[str, str]:
    """Returns the arguments `template` and `name` of a render function, if not the packaged one."""
    return {} if template is None else {"template": template.read(), "name": template.name}


@contextlib.contextmanager
def errors_as_messages() -> Generator[None]:
    """Turns invalid values and missing libraries into messages of the command."""
    try:
        yield
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except ImportError as error:
        raise click.ClickException(str(error)) from error


# `stratagem kubernetes`: rendering of manifests.


_ray_option = click.option(
    "--ray",
    is_flag=True,
    help="Use a KubeRay cluster that runs programs of remote clients, or --script.",
)


@click.group("kubernetes", cls=Commands)
def kubernetes_group() -> None:
    """Render manifests for Kubernetes."""


@kubernetes_group.command("render")
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
def _render_kubernetes(
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


@kubernetes_group.command("template")
@_ray_option
def _print_kubernetes(*, ray: bool) -> None:
    """Print the packaged template, for editing."""
    from stratagem.cli.manifests.rendering import kubernetes_template, ray_template

    text = ray_template() if ray else kubernetes_template()
    click.echo(text, nl=False)


# `stratagem slurm`: rendering of batch scripts.


@click.group("slurm", cls=Commands)
def slurm_group() -> None:
    """Render batch scripts for Slurm."""


@slurm_group.command("render")
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
def _render_slurm(
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


@slurm_group.command("template")
def _print_slurm() -> None:
    """Print the packaged template, for editing."""
    from stratagem.cli.manifests.rendering import slurm_template

    click.echo(slurm_template(), nl=False)

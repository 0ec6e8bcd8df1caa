"""`stratagem server` and `stratagem input-service`, and `stratagem secret` for their runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import click

from stratagem import errors as exit_codes

_POLL_S = 0.2


@click.command("server")
@click.option("--cluster", help="All tasks, as JSON; by default those of TF_CONFIG.")
@click.option("--job-name", help="Type of this task, such as worker.")
@click.option("--task-index", type=click.IntRange(0), help="Index among tasks of the same type.")
@click.option(
    "--jobs-port",
    type=click.IntRange(1, 65535),
    envvar="STRATAGEM_JOBS_PORT",
    show_envvar=True,
    help="Port on which the leader accepts jobs.  [default: 8265]",
)
def server_command(
    cluster: str | None, job_name: str | None, task_index: int | None, jobs_port: int | None
) -> None:
    """Serve one task of a cluster that runs clients' programs.

    The task is read from TF_CONFIG by default. All tasks and clients share a secret,
    RAY_AUTH_TOKEN. The server runs until it receives SIGTERM or the leader exits.
    """
    from stratagem.launch import remote

    # Exit cleanly: processes that Ray started here must not outlive this one.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        if cluster is None and job_name is None and task_index is None:
            server = remote.run_standard_server(jobs_port=jobs_port)
        else:
            parsed_cluster = _parse_cluster(cluster)
            server = remote.Server(parsed_cluster, job_name, task_index, jobs_port=jobs_port)
        with server:
            click.echo(f"{server.server_def.job_name} {server.server_def.task_index} is ready.")
            server.join()
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(exit_codes.INTERRUPTED) from None


def _exit_on_signal(signum: int, _: object) -> None:
    raise SystemExit(128 + signum)


def _parse_cluster(text: str | None) -> Any:
    if text is None:
        from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver

        return TFConfigClusterResolver().cluster_spec()
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--cluster is not JSON: {error}") from error


@click.command("input-service")
@click.option(
    "--workers", type=click.IntRange(0), default=1, show_default=True, help="Number of workers."
)
@click.option(
    "--dispatcher",
    metavar="HOST:PORT",
    help="Start only workers, which join the dispatcher at this address.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address of this machine for trainers and workers; a network needs a secret.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Port of the dispatcher.  [default: a free one]",
)
def input_service_command(workers: int, dispatcher: str | None, host: str, port: int) -> None:
    """Read datasets for trainers, in processes of their own.

    Prints the address for sg.input.service.distribute, and runs until it receives SIGTERM. On a
    network, all processes of the run share a secret: STRATAGEM_SECRET or STRATAGEM_SECRET_FILE.
    """
    from stratagem.input.service.address_book import DispatcherConfig
    from stratagem.input.service.workers import InputService, InputWorkers

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        with contextlib.ExitStack() as stack:
            if dispatcher is None:
                config = DispatcherConfig(port=port, host=host)
                service = stack.enter_context(InputService(config, workers))
                click.echo(f"Input service at {service.target} has {workers} workers.")
            else:
                stack.enter_context(InputWorkers(dispatcher, workers, host=host))
                click.echo(f"{workers} input workers joined {dispatcher}.")
            while not ended.wait(_POLL_S):  # A signal may arrive in another thread.
                pass
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(exit_codes.INTERRUPTED) from None


@click.command("secret")
@click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="Write the secret to a new file of mode 0600, for STRATAGEM_SECRET_FILE.",
)
@click.option(
    "--telemetry",
    is_flag=True,
    help="Print the token with which Prometheus reads the metrics of a run with this secret.",
)
def secret_command(path: Path | None, *, telemetry: bool) -> None:
    """Make a secret for the processes of a run.

    Give it to all of them, in STRATAGEM_SECRET or in a file. Nobody else may read it.
    """
    from stratagem.group.authentication.secret import find_secret, new_secret

    if telemetry:
        from stratagem.cli.runs import PURPOSE

        try:
            secret = find_secret()
        except ValueError as error:
            raise click.ClickException(str(error)) from error
        if secret is None or path is not None:
            raise click.UsageError("--telemetry needs STRATAGEM_SECRET or its file, and no --file.")
        click.echo(secret.key(PURPOSE).hex())
        return
    if path is None:
        click.echo(new_secret())
        return
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise click.ClickException(f"{path} cannot be created: {error.strerror}.") from error
    with contextlib.closing(os.fdopen(descriptor, "w", encoding="utf-8")) as file:
        file.write(f"{new_secret()}\n")

"""`stratagem server`: the server of one task, which is all that its machine runs.

The server itself is loaded when the command is called.
"""

from __future__ import annotations

import importlib
import json
import signal
from typing import Any

import click

__all__ = ["command"]


@click.command("server")
@click.option("--cluster", help="All tasks, as JSON; without it those of TF_CONFIG.")
@click.option("--job-name", help="The type of this task, such as worker.")
@click.option("--task-index", type=click.IntRange(0), help="Its place among the tasks of its type.")
@click.option(
    "--jobs-port",
    type=click.IntRange(1, 65535),
    envvar="STRATAGEM_JOBS_PORT",
    show_envvar=True,
    help="Where the leader takes jobs of clients.  [default: 8265]",
)
def command(
    cluster: str | None, job_name: str | None, task_index: int | None, jobs_port: int | None
) -> None:
    """Give this machine to a cluster that runs what clients send.

    The task is that of TF_CONFIG. It needs the secret that all tasks and clients share:
    RAY_AUTH_TOKEN. It runs until it gets SIGTERM or the leader ends.
    """
    # Ends in order: what Ray has started here must not outlive it.
    signal.signal(signal.SIGTERM, _leave)
    remote = importlib.import_module("stratagem.remote")
    try:
        if cluster is None and job_name is None and task_index is None:
            server = remote.run_standard_server(jobs_port=jobs_port)
        else:
            given = _cluster(cluster)
            server = remote.Server(given, job_name, task_index, jobs_port=jobs_port)
        with server:
            click.echo(f"{server.server_def.job_name} {server.server_def.task_index} is ready.")
            server.join()
    except (ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise click.ClickException(str(error)) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _leave(signum: int, _: object) -> None:
    raise SystemExit(128 + signum)


def _cluster(text: str | None) -> Any:
    if text is None:
        resolvers = importlib.import_module("stratagem.cluster")
        return resolvers.TFConfigClusterResolver().cluster_spec()
    try:
        return json.loads(text)
    except ValueError as error:
        raise click.UsageError(f"--cluster is not JSON: {error}") from error

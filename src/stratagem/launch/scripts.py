"""`run`: runs a script as every task of a cluster."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Unpack

from stratagem.launch.nodes.launch_nodes import launch_nodes
from stratagem.launch.nodes.ssh_launch import launch_over_ssh
from stratagem.launch.nodes.ssh_lease import hold_lease
from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchArguments, LaunchOptions
from stratagem.launch.restart.launcher import Outcome
from stratagem.launch.tasks.command import command_of
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.output.tracebacks import failure_lines
from stratagem.messages import explain


class RemoteError(Exception):
    """Last lines of a failed task, as the cause of the error raised here.

    Example:
        >>> try:
        ...     sg.launch.run("sh", ["-c", "echo no data >&2; exit 3"])
        ... except RuntimeError as error:
        ...     print(str(error.__cause__).strip())
        no data

    Source: specific to Stratagem.
    """

    def __str__(self) -> str:
        return "\n" + "\n".join(map(str, self.args))


def run(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    elastic: ElasticConfig | None = None,
    **options: Unpack[LaunchArguments],
) -> None:
    """Runs a script as every task of a cluster, as `stratagem launch` does.

    Each task finds the cluster and its own task in `TF_CONFIG`. Its output appears here. When one
    task fails, the others are stopped. Called in the main thread, this passes signals on to the
    tasks. No task outlives this process. With `nnodes` or `hosts` the cluster has several machines.

    Args:
        script: a Python file, a program, or a module.
        args: arguments of the script.
        module: True if `script` is the name of a module, as in `python -m`.
        elastic: allowed numbers of workers; replaces `min_workers` and `max_workers`.
        **options: the fields of `LaunchOptions`.

    Raises:
        RuntimeError: a task failed. The cause has the last lines of that task.
        FileNotFoundError: there is no such script.
        ValueError: an option is out of range, or there are fewer GPUs than requested.
        UnavailableError: too few workers could run for longer than the limit, or a node is lost.

    Example:
        >>> sg.launch.run("echo", ["hello"])
        [worker 0] hello

    Source: specific to Stratagem.
    """
    outcome = run_script(script, args, module=module, elastic=elastic, **options)
    cause = raise_received_signal(outcome)
    if cause is not None:
        raise launch_error(cause, outcome) from RemoteError(*failure_lines(cause.lines))


def run_script(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    elastic: ElasticConfig | None = None,
    **options: Unpack[LaunchArguments],
) -> Outcome:
    """Runs a script as `run` does, but returns failures and signals instead of raising them."""
    if options.get("hosts") is not None or options.get("hostfile") is not None:
        words = (*(["-m"] if module else []), os.fspath(script), *args)
        return launch_over_ssh(words, LaunchOptions(**options))
    command = command_of(script, args, module=module)
    launch_options = LaunchOptions(**options)
    hold_lease(launch_options.grace_s)
    return launch_nodes(command, launch_options, elastic=elastic)


def raise_received_signal(outcome: Outcome) -> ExitStatus | None:
    """Raises here the signal that ended the tasks; returns the task that failed first, or None."""
    if outcome.signum is not None:
        signal.raise_signal(outcome.signum)
    return outcome.cause


def launch_error(cause: ExitStatus, outcome: Outcome) -> RuntimeError:
    """Returns the error that names the task that failed first."""
    return RuntimeError(
        explain(
            f"{cause.culprit} failed first of {len(outcome.statuses)} tasks: {cause.why}.",
            expected="every task to end with exit code 0.",
            fix="read its last lines, which are the cause of this error.",
            code="SG803",
        )
    )

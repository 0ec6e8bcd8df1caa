"""`run`: a script as every task of a cluster on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Unpack

from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchArguments, LaunchOptions
from stratagem.launch.restart.launcher import Outcome, launch
from stratagem.launch.tasks.command import command_of
from stratagem.launch.tasks.exit_status import TaskEnd, how_it_ended, last_words
from stratagem.messages import explain

__all__ = ["RemoteError", "failure", "finish_here", "run", "run_script"]


class RemoteError(Exception):
    """The last words of a task that failed, as the cause of the error that it leads to here."""

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
    """Runs a script as every task of a cluster on this machine, as `stratagem launch` does.

    Each task finds the cluster and its own place in it in `TF_CONFIG`. What it prints appears
    here. When one fails, the others are stopped. Signals to this process go to the tasks if this
    is called in the main thread; none of them outlives it.

    Args:
        script: a Python file, a program, or a module.
        args: its arguments.
        module: `script` is a module's name, as in `python -m`.
        elastic: with how many workers it may go on; in place of `min_workers` and `max_workers`.
        **options: the fields of `LaunchOptions`.

    Raises:
        RuntimeError: a task has failed. Its cause holds what that task printed last.
        FileNotFoundError: no such script.
        ValueError: an option out of range, or fewer GPUs than asked for.
        UnavailableError: too few workers could run for longer than the limit.

    Example:
        >>> sg.launch.run("echo", ["hello"])
        [worker 0] hello
    """
    outcome = run_script(script, args, module=module, elastic=elastic, **options)
    cause = finish_here(outcome)
    if cause is not None:
        raise failure(cause, outcome) from RemoteError(*last_words(cause.lines))


def run_script(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    *,
    module: bool = False,
    elastic: ElasticConfig | None = None,
    **options: Unpack[LaunchArguments],
) -> Outcome:
    """Does the same as `run`, and leaves it to the caller what a failure or a signal means.

    Args:
        script: a Python file, a program, or a module.
        args: its arguments.
        module: `script` is a module's name.
        elastic: with how many workers it may go on; in place of `min_workers` and `max_workers`.
        **options: the fields of `LaunchOptions`.

    Returns:
        How the tasks ended.

    Raises:
        FileNotFoundError: no such script.
        ValueError: an option out of range, or fewer GPUs than asked for.
        UnavailableError: too few workers could run for longer than the limit.
    """
    command = command_of(script, args, module=module)
    return launch(command, LaunchOptions(**options), elastic=elastic)


def finish_here(outcome: Outcome) -> TaskEnd | None:
    """Lets a signal that has ended the tasks do here what it would have done without them.

    Args:
        outcome: how the tasks ended.

    Returns:
        The task that failed first; None if none failed.
    """
    if outcome.signum is not None:
        signal.raise_signal(outcome.signum)
    return outcome.cause


def failure(cause: TaskEnd, outcome: Outcome) -> RuntimeError:
    """Returns the error that names the task that failed first.

    Args:
        cause: that task.
        outcome: how all ended.

    Returns:
        The error, to be raised from what the task said itself.
    """
    return RuntimeError(
        explain(
            f"{cause.name} failed first of {len(outcome.ends)} tasks: "
            f"{how_it_ended(cause.returncode)}.",
            expected="every task to end with exit code 0.",
            fix="see what it printed last, which is the cause of this error.",
        )
    )

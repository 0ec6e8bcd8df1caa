"""`spawn`: calls a function in every task of a cluster on this machine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from stratagem.launch.packing import pack_function_call
from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchArguments, LaunchOptions
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.restart.launcher import Outcome, launch
from stratagem.launch.scripts import RemoteError, launch_error, raise_received_signal
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.function_task import (
    CALL,
    CallResult,
    is_loading_script,
    read_result,
    task_command,
)
from stratagem.launch.tasks.output.tracebacks import failure_lines
from stratagem.messages import explain
from stratagem.temporary_folders import TemporaryFolder


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    elastic: ElasticConfig | None = None,
    **options: Unpack[LaunchArguments],
) -> list[Any]:
    """Calls a function in every task of a cluster on this machine, each in a new process.

    Each task imports a function of a module. A function of a notebook, of the prompt or of a script
    is sent by value, with the variables that it uses; so is a `lambda`, or a function in another
    one. A script that calls this under `if __name__ == "__main__":` is imported instead, as by
    `multiprocessing`.

    In a notebook the output appears below the cell. An interrupt, such as the stop button, ends all
    tasks within `grace_s` seconds.

    Args:
        fn: the function.
        args: its arguments, the same for all tasks.
        kwargs: its keyword arguments.
        elastic: allowed numbers of workers; replaces `min_workers` and `max_workers`.
        **options: the fields of `LaunchOptions`.

    Returns:
        The values that the workers returned, a chief's first. Values of servers and evaluators are
        dropped.

    Raises:
        Exception: raised by the task that failed first; its cause has the traceback of that task.
        RuntimeError: the task that failed first raised no exception, or a task called this while it
            was importing its script.
        TypeError: the call or a returned value cannot be pickled; a strategy, a model and other
            variables cannot.
        ValueError: an option is out of range, or there are fewer GPUs than requested.
        UnavailableError: too few workers could run for longer than the limit.

    Example:
        >>> sg.launch.spawn(pow, (2, 10), workers=3)
        [1024, 1024, 1024]

    Source: specific to Stratagem.
    """
    _require_loaded_script()
    launch_options = LaunchOptions(**options)
    _require_one_machine(launch_options)
    return _spawn(pack_function_call(fn, args, kwargs or {}), launch_options, elastic)


def _require_loaded_script() -> None:
    if is_loading_script():
        raise RuntimeError(
            explain(
                "A task called spawn while it was loading its script.",
                expected="a script whose functions can be imported without doing its work.",
                fix='move the call of spawn under `if __name__ == "__main__":`.',
                code="SG804",
            )
        )


def _require_one_machine(options: LaunchOptions) -> None:
    given = [options.hosts, options.hostfile, options.nnodes]
    if any(one is not None for one in given) and given != [None, None, 1]:
        raise ValueError(
            explain(
                f"spawn with nnodes={options.nnodes!r}, hosts={options.hosts!r} and "
                f"hostfile={options.hostfile!r}.",
                expected="one machine: the function is sent to processes of this machine.",
                fix="call it in a script, and start that with sg.launch.run or stratagem launch.",
            )
        )


def _spawn(call: bytes, options: LaunchOptions, elastic: ElasticConfig | None) -> list[Any]:
    with TemporaryFolder("stratagem-spawn-") as made:
        folder = made.path
        (folder / CALL).write_bytes(call)
        plans: dict[str, TaskPlan] = {}
        outcome = launch(
            task_command(folder),
            options,
            finish=functools.partial(_finish, plans=plans),
            elastic=elastic,
            kills_interrupted=True,
        )
        cause = raise_received_signal(outcome)
        if cause is not None:
            _raise(cause, outcome, _result(folder, plans[cause.name]))
        # Of the last start: an earlier one may have had more workers.
        trainers = [plans[status.name] for status in outcome.statuses if status.trains]
        return [_result(folder, plan).value for plan in trainers]


def _finish(plan: TaskPlan, *, plans: dict[str, TaskPlan]) -> TaskPlan:
    """Adds the name of the result file, a new one for each restart."""
    restart = plan.variables["STRATAGEM_RESTART_COUNT"]
    plan = dataclasses.replace(plan, command=(*plan.command, f"{plan.file_name}-{restart}"))
    plans[plan.name] = plan
    return plan


def _result(folder: Path, plan: TaskPlan) -> CallResult:
    path = folder / plan.command[-1]
    if not path.exists():  # the task was killed, or called sys.exit
        return CallResult()
    with open(path, "rb") as file:
        return read_result(file)


def _raise(cause: ExitStatus, outcome: Outcome, result: CallResult) -> None:
    remote = RemoteError(f"[{cause.name}]", *(result.traceback or failure_lines(cause.lines)))
    if result.error is not None:
        raise result.error from remote
    raise launch_error(cause, outcome) from remote

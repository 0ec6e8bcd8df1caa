"""`spawn`: a function in every task of a cluster on this machine."""

from __future__ import annotations

import dataclasses
import functools
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchArguments, LaunchOptions
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.restart.launcher import Outcome, launch
from stratagem.launch.scripts import RemoteError, failure, finish_here
from stratagem.launch.tasks import function_task
from stratagem.launch.tasks.exit_status import TaskEnd, last_words
from stratagem.messages import explain

__all__ = ["spawn"]


def spawn(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    elastic: ElasticConfig | None = None,
    **options: Unpack[LaunchArguments],
) -> list[Any]:
    """Calls a function in every task of a cluster on this machine, each a new process.

    As with `multiprocessing`'s spawn, the function is imported there: it stands in a module, or in
    a script that does its work under `if __name__ == "__main__":`.

    Args:
        fn: the function.
        args: its arguments, the same for all tasks.
        kwargs: its keyword arguments.
        elastic: with how many workers it may go on; in place of `min_workers` and `max_workers`.
        **options: the fields of `LaunchOptions`.

    Returns:
        What each worker returned, a chief's first. What servers and evaluators return is dropped.

    Raises:
        Exception: what the task that failed first has raised; its cause holds the traceback there.
        RuntimeError: that task did not end by an exception, or a script without a guard.
        TypeError: something that cannot be sent to another process or back.
        ValueError: an option out of range, or fewer GPUs than asked for.
        UnavailableError: too few workers could run for longer than the limit.

    Example:
        >>> sg.launch.spawn(pow, (2, 10), workers=3)
        [1024, 1024, 1024]
    """
    if function_task.is_loading_script():
        raise RuntimeError(
            explain(
                "A task that is loading its script starts tasks.",
                expected="a script whose functions can be loaded without doing its work.",
                fix='put the call of spawn under `if __name__ == "__main__":`.',
            )
        )
    call = _pickled(fn, args, kwargs or {})
    launch_options = LaunchOptions(**options)
    with tempfile.TemporaryDirectory(prefix="stratagem-") as name:
        folder = Path(name)
        (folder / function_task.CALL).write_bytes(call)
        plans: dict[str, TaskPlan] = {}
        outcome = launch(
            function_task.command(folder),
            launch_options,
            finish=functools.partial(_finish, plans=plans),
            elastic=elastic,
        )
        cause = finish_here(outcome)
        if cause is not None:
            _raise(cause, outcome, _answer(folder, plans[cause.name]))
        # Of the last start: one before may have had more workers.
        trainers = [plans[end.name] for end in outcome.ends if end.trains]
        return [_answer(folder, plan).value for plan in trainers]


def _finish(plan: TaskPlan, *, plans: dict[str, TaskPlan]) -> TaskPlan:
    """Each task is told which file its answer belongs into, another one after a restart."""
    restart = plan.variables["STRATAGEM_RESTART_COUNT"]
    plan = dataclasses.replace(plan, command=(*plan.command, f"{plan.file_name}-{restart}"))
    plans[plan.name] = plan
    return plan


def _pickled(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    if not callable(fn):
        raise TypeError(
            explain(
                f"fn={fn!r} is of type {type(fn).__name__}.",
                expected="a function.",
                fix="pass the function itself and its arguments apart: spawn(train, (3,)).",
            )
        )
    try:
        call = pickle.dumps((fn, tuple(args), dict(kwargs)))
    except Exception as error:
        raise TypeError(
            explain(
                f"{fn!r} with its arguments cannot be sent to another process: {error}",
                expected="a function at the top of a module, and arguments that can be pickled.",
                fix="move the function there, and make in it what cannot be sent.",
            )
        ) from error
    main = sys.modules["__main__"]
    main_path = getattr(main, "__file__", None)
    if b"__main__" not in call:
        main_path = None
    elif main_path is None:
        raise TypeError(
            explain(
                f"{fn!r} or its arguments belong to an interactive session.",
                expected="what another process can import.",
                fix="put it into a module.",
            )
        )
    header = {"sys_path": sys.path, "main_path": main_path and str(Path(main_path).resolve())}
    return pickle.dumps(header) + call


def _answer(folder: Path, plan: TaskPlan) -> function_task.Answer:
    path = folder / plan.command[-1]
    # A task that was killed, or that called sys.exit, has left none.
    return function_task.read_answer(path) if path.exists() else function_task.Answer()


def _raise(cause: TaskEnd, outcome: Outcome, answer: function_task.Answer) -> None:
    remote = RemoteError(f"[{cause.name}]", *(answer.traceback or last_words(cause.lines)))
    if answer.error is not None:
        raise answer.error from remote
    raise failure(cause, outcome) from remote

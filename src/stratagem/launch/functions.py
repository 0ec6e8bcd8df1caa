"""`spawn`: calls a function in every task of a cluster on this machine."""

from __future__ import annotations

import ast
import dataclasses
import functools
import linecache
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from stratagem.errors import explain
from stratagem.launch.nodes.launch_nodes import launch_nodes
from stratagem.launch.nodes.ssh_launch import hold_lease, launch_over_ssh
from stratagem.launch.plan.elastic import ElasticConfig
from stratagem.launch.plan.options import LaunchArguments, LaunchOptions
from stratagem.launch.plan.task_plan import TaskPlan
from stratagem.launch.restart.launcher import Outcome, launch
from stratagem.launch.tasks.command import command_of
from stratagem.launch.tasks.exit_status import ExitStatus
from stratagem.launch.tasks.function_task import (
    CALL,
    CallResult,
    is_loading_script,
    pack_call,
    read_result,
    task_command,
)
from stratagem.launch.tasks.output.tracebacks import failure_lines
from stratagem.launch.tasks.pickling import (
    captured_values,
    dumps_without_state,
    find_unpicklable,
    live_kind,
)
from stratagem.resources import TemporaryFolder

# `run`: runs a script as every task of a cluster.


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


# Calls for new processes: functions by import, or by value if no process can import them.


def require_callable(fn: object, example: str) -> None:
    """Raises TypeError unless `fn` is callable; `example` shows a correct call."""
    if not callable(fn):
        raise TypeError(
            explain(
                f"fn={fn!r} is of type {type(fn).__name__}.",
                expected="a function.",
                fix=f"pass the function and its arguments separately: {example}.",
            )
        )


def pack_function_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Returns the content of the file of a call; raises TypeError if it cannot be pickled.

    Each process imports a function of a module. It also imports a script that is running the body
    of its guard, like multiprocessing. Everything else is sent by value.
    """
    require_callable(fn, "spawn(train, (3,))")
    call = (fn, tuple(args), dict(kwargs))
    try:
        pickled = pickle.dumps(call)
    except Exception:  # noqa: BLE001 - __reduce__ may raise anything
        return _packed_by_value(call)
    if b"__main__" not in pickled:
        return pack_call(pickled, path=sys.path)
    script = _guarded_script()
    if script is None:
        return _packed_by_value(call)
    return pack_call(pickled, path=sys.path, main_path=str(script))


def _packed_by_value(call: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> bytes:
    try:
        pickled = dumps_without_state(call)
    except Exception as error:
        raise _unsendable(*call, error) from error
    return pack_call(pickled, path=sys.path, by_value=True, sources=_sources_in(pickled))


def _sources_in(pickled: bytes) -> dict[str, str]:
    """Returns the texts of the cells and prompts whose code is in a pickled call, by file name."""
    return {
        name: "".join(linecache.getlines(name))
        for name in list(linecache.cache)
        if name.encode() in pickled and not os.path.exists(name)
    }


def _guarded_script() -> Path | None:
    """Returns the script if it is running the body of its guard; None if it cannot be imported."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or not os.path.isfile(file):
        return None
    path = Path(file).resolve()
    guards = _guards(path)
    if threading.current_thread() is not threading.main_thread():
        return path if guards else None
    for frame, line in traceback.walk_stack(None):
        is_of_script = frame.f_globals is vars(main) and frame.f_code.co_name == "<module>"
        if is_of_script and Path(frame.f_code.co_filename).name == path.name:
            return path if any(line in guard for guard in guards) else None
    return None


def _guards(script: Path) -> list[range]:
    """Returns the lines of each body under `if __name__ == "__main__":`."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    return [
        range(node.body[0].lineno, (node.body[-1].end_lineno or node.body[-1].lineno) + 1)
        for node in tree.body
        if isinstance(node, ast.If) and _compares_name(node.test)
    ]


def _compares_name(test: ast.expr) -> bool:
    nodes = list(ast.walk(test))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return "__name__" in names and "__main__" in texts


def _unsendable(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> TypeError:
    parts = {f"Argument {index}": value for index, value in enumerate(args)}
    parts |= {f"Argument {name!r}": value for name, value in kwargs.items()}
    parts |= captured_values(fn)
    name, value = find_unpicklable(parts, pickled=dumps_without_state) or ("", None)
    called = getattr(fn, "__qualname__", repr(fn))
    subject = f"{name} of {called}, of type {type(value).__name__}," if name else called
    expected = "arguments and captured variables that can be pickled."
    fix = "create the object inside the function, or pass the values that it is made of."
    kind = live_kind(value)
    if kind == "state":
        expected = "a function that creates its model itself, in the scope of its own strategy."
        fix = "create it inside the function; pass weights as arrays: model.get_weights()."
    elif kind == "strategy":
        expected = "a function that creates its own strategy, on the devices of its process."
        fix = "create it inside the function: strategy = sg.MultiWorkerMirroredStrategy()."
    reason = str(error).splitlines()[:1]
    return TypeError(
        explain(
            f"{subject} cannot be sent to another process: {' '.join(reason)}",
            expected=expected,
            fix=fix,
            code="SG606",
        )
    )


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

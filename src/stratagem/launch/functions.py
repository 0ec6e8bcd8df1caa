"""`run` runs a script as every task of a cluster; `spawn` calls a function in every task."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import importlib.util
import inspect
import io
import linecache
import os
import pickle
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Unpack, cast

from stratagem.environment import load
from stratagem.errors import check_type, explain, invalid
from stratagem.launch.options import ElasticConfig, LaunchArguments, LaunchOptions
from stratagem.launch.plan import TaskPlan, find_node
from stratagem.launch.restart.launcher import Outcome, launch
from stratagem.launch.tasks.exit_status import ExitStatus, failure_lines
from stratagem.launch.tasks.function_task import (
    CALL,
    CallResult,
    is_loading_script,
    pack_call,
    read_result,
    task_command,
)
from stratagem.resources import TemporaryFolder

# Pickling by value with cloudpickle, and search for objects that cannot be pickled.

_MAX_DEPTH = 8


def dumps(value: object) -> bytes:
    """Pickles an object for another machine, functions and classes of a script by value."""
    return _cloudpickle().dumps(value)


def dumps_without_state(value: object) -> bytes:
    """Pickles like `dumps`; raises TypeError for strategies, models and variables.

    Another process would train a copy of a model, without its strategy, and lose it.
    """
    file = io.BytesIO()
    _stateless_pickler()(file).dump(value)
    return file.getvalue()


def live_kind(value: object) -> Literal["strategy", "state"] | None:
    """Returns "state" for a Keras object with variables of this process; None for others."""
    if hasattr(type(value), "num_replicas_in_sync"):
        return "strategy"
    keras: Any = sys.modules.get("keras")  # not loaded: there is none of its objects
    if keras is None or not hasattr(keras, "Model"):
        return None
    state = (keras.Model, keras.Variable, keras.optimizers.Optimizer, keras.metrics.Metric)
    is_layer = isinstance(value, keras.layers.Layer)
    is_built = is_layer and bool(getattr(value, "variables", ()))
    return "state" if is_built or isinstance(value, state) else None


def find_unpicklable(
    parts: Mapping[str, Any], depth: int = _MAX_DEPTH, pickled: Callable[[object], bytes] = dumps
) -> tuple[str, Any] | None:
    """Returns the innermost part that cannot be pickled, with its description; None without one.

    `parts` are objects by description; `depth` limits the search inside them.
    """
    for name, value in parts.items():
        try:
            pickled(value)
        except Exception:  # noqa: BLE001 - __reduce__ may raise anything
            parts = _parts_of(name, value) if depth and live_kind(value) is None else {}
            return find_unpicklable(parts, depth - 1, pickled) or (name, value)
    return None


def captured_values(fn: Callable[..., Any]) -> dict[str, Any]:
    """Returns the variables that a callable captures, by description."""
    with contextlib.suppress(TypeError, ValueError):
        captured = inspect.getclosurevars(fn)
        both = {**captured.nonlocals, **captured.globals}
        return {f"Variable {name!r}": value for name, value in both.items()}
    return {}


def _parts_of(name: str, value: object) -> dict[str, Any]:
    if inspect.isfunction(value):
        return {f"{part} of {name}": one for part, one in captured_values(value).items()}
    if isinstance(value, Mapping):
        return {f"{name}[{key!r}]": one for key, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return {f"{name}[{index}]": one for index, one in enumerate(value)}
    state: Any = None
    if hasattr(value, "__dict__"):
        with contextlib.suppress(Exception):  # that of an open file raises, since Python 3.12
            state = value.__getstate__()
    if not isinstance(state, dict) or inspect.ismodule(value):
        return {}
    return {f"{name}.{part}": one for part, one in cast("dict[str, Any]", state).items()}


def _cloudpickle() -> Any:
    return load("cloudpickle", needed_by="a function that is sent", install="cloudpickle")


@functools.cache
def _stateless_pickler() -> Any:
    cloudpickle = _cloudpickle()

    class StatelessPickler(cloudpickle.Pickler):
        """Pickler that sees every object first."""

        def reducer_override(self, obj: object) -> Any:
            if live_kind(obj) is not None:
                raise TypeError(
                    explain(
                        f"A {type(obj).__name__} belongs to this process.",
                        expected="a function that creates its strategy and model itself.",
                        fix="create them inside the function.",
                    )
                )
            return super().reducer_override(obj)

    return StatelessPickler


# Command line of a script, a module or a program.


def command_of(
    script: str | os.PathLike[str], args: Sequence[str] = (), *, module: bool = False
) -> tuple[str, ...]:
    """Returns the program to execute, and its arguments.

    `script` is a Python file (`.py`), which runs on this interpreter; any other program, by path or
    by name on PATH; or, with `module`, a module. Raises FileNotFoundError if it does not exist,
    PermissionError if it is not executable.

    Example:
        >>> import sys
        >>> command_of("json.tool", ["--indent", "2"], module=True)[1:]
        ('-m', 'json.tool', '--indent', '2')
    """
    name = os.fspath(script)
    if module:
        _check_module(name)
        return (sys.executable, "-m", name, *args)
    path = Path(name)
    if path.suffix == ".py":
        if not path.is_file():
            raise FileNotFoundError(
                explain(
                    f"There is no file {name!r} in {Path.cwd()}.",
                    expected="a Python script.",
                    fix="correct the path, or pass module=True (-m) to run a module.",
                )
            )
        return (sys.executable, name, *args)
    return (_find_program(name), *args)


def _find_program(name: str) -> str:
    path = Path(name)
    program = os.path.join(os.curdir, name) if path.is_file() and path.parent == Path() else name
    found = shutil.which(program)
    if found is None and path.is_file():
        raise PermissionError(
            explain(
                f"The file {name!r} is not executable.",
                expected="a Python script whose name ends in .py, or a program.",
                fix=f"run `chmod +x {name}`, or put `python` in front of it.",
            )
        )
    if found is None:
        raise FileNotFoundError(
            explain(
                f"There is no program {name!r} in {Path.cwd()} or on PATH.",
                expected="a Python script (.py), a program, or a module with module=True (-m).",
                fix="correct the name.",
            )
        )
    return found


def _check_module(name: str) -> None:
    # Does not import packages: that is up to the script.
    top = name.partition(".")[0]
    here = Path(top).is_dir() or Path(f"{top}.py").is_file()
    if not name or not (here or importlib.util.find_spec(top)):
        raise FileNotFoundError(
            explain(
                f"There is no module {name!r} on the path of this interpreter or in {Path.cwd()}.",
                expected="the name of a module or package, as for `python -m`.",
                fix="correct the name, or omit module=True (-m) to run a file.",
            )
        )


# `run`.


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
    tasks. No task outlives this process. With `nnodes` the cluster has several machines, each of
    which calls this.

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
        UnavailableError: too few workers could run for longer than the limit.

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
    command = command_of(script, args, module=module)
    launch_options = LaunchOptions(**options)
    return launch(command, launch_options, elastic=elastic, node=find_node(launch_options))


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
    fix = f"pass the function and its arguments separately: {example}."
    check_type("fn", fn, callable, "a function", fix)


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
        raise unsendable(
            *call, error, where="another process", pickled=dumps_without_state
        ) from error
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


def unsendable(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: Exception,
    *,
    where: str,
    pickled: Callable[[object], bytes],
) -> TypeError:
    """Returns the error of a call that `pickled` cannot pickle, which names the part."""
    parts = {f"Argument {index}": value for index, value in enumerate(args)}
    parts |= {f"Argument {name!r}": value for name, value in kwargs.items()}
    parts |= captured_values(fn)
    name, value = find_unpicklable(parts, pickled=pickled) or ("", None)
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
            f"{subject} cannot be sent to {where}: {' '.join(reason)}",
            expected=expected,
            fix=fix,
            code="SG606",
        )
    )


# `spawn`.


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
    if is_loading_script():
        raise RuntimeError(
            explain(
                "A task called spawn while it was loading its script.",
                expected="a script whose functions can be imported without doing its work.",
                fix='move the call of spawn under `if __name__ == "__main__":`.',
                code="SG804",
            )
        )
    launch_options = LaunchOptions(**options)
    if launch_options.nnodes not in (None, 1):
        raise invalid(
            f"spawn with nnodes={launch_options.nnodes!r}.",
            expected="one machine: the function is sent to processes of this machine.",
            fix="call it in a script, and start that with sg.launch.run or stratagem launch.",
        )
    call = pack_function_call(fn, args, kwargs or {})
    with TemporaryFolder("stratagem-spawn-") as made:
        folder = made.path
        (folder / CALL).write_bytes(call)
        plans: dict[str, TaskPlan] = {}
        outcome = launch(
            task_command(folder),
            launch_options,
            finish=functools.partial(_finish, plans=plans),
            elastic=elastic,
            kills_interrupted=True,
        )
        cause = raise_received_signal(outcome)
        if cause is not None:
            result = _result(folder, plans[cause.name])
            lines = result.traceback or failure_lines(cause.lines)
            raise (result.error or launch_error(cause, outcome)) from RemoteError(
                f"[{cause.name}]", *lines
            )
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

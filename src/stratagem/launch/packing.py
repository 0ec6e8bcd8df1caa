"""Calls for new processes: functions by import, or by value if no process can import them."""

from __future__ import annotations

import ast
import linecache
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.launch.tasks.function_task import pack_call
from stratagem.launch.tasks.pickling import (
    captured_values,
    dumps_without_state,
    find_unpicklable,
    live_kind,
)
from stratagem.messages import explain


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

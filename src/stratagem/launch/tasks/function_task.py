"""The program of a task that calls a function: it reads the call and writes the answer.

It runs as a file, alone: where the package and the function are found is told in the call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import pickle
import runpy
import sys
import traceback
import types
from pathlib import Path
from typing import IO, Any

__all__ = ["Answer", "CALL", "command", "is_loading_script", "read_answer"]

CALL = "call.pickle"
# As multiprocessing names it, so that `if __name__ == "__main__":` keeps its meaning.
_MAIN = "__mp_main__"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of the call in one task.

    Args:
        value: what the function returned.
        error: what it raised; None where nothing was, or where it cannot be sent.
        traceback: the lines that show where.
    """

    value: Any = None
    error: Exception | None = None
    traceback: tuple[str, ...] = ()


class _Unpickler(pickle.Unpickler):
    """Finds in the script here what belongs to the script there."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == _MAIN else module, name)


def command(folder: Path) -> tuple[str, ...]:
    """Returns the command of a task, but for the name of the file for its answer.

    Args:
        folder: where the call is.

    Returns:
        The program and its arguments.
    """
    # -P: the folder of this file is no place to look for modules.
    return (sys.executable, "-P", __file__, str(folder))


def read_answer(path: Path) -> Answer:
    """Reads what a task has written.

    Args:
        path: its file, in a folder that only this user can write to.

    Returns:
        The answer.
    """
    with open(path, "rb") as file:
        value, error, lines = _Unpickler(file).load()
    return Answer(value=value, error=error, traceback=lines)


def is_loading_script() -> bool:
    """Returns whether this process is a task that has not yet got to its function.

    Returns:
        True while it runs the script that the function is in.
    """
    main, script = sys.modules["__main__"], sys.modules.get(_MAIN)
    # multiprocessing gives the main module its second name too.
    return getattr(main, "__file__", None) == __file__ and script not in (None, main)


def _main() -> None:
    folder, name = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[:1]
    with open(folder / CALL, "rb") as file:
        try:
            fn, args, kwargs = _load_call(file)
            value = fn(*args, **kwargs)
            answer = _pickled_value(fn, value)
        except Exception as error:
            _write(folder / name, _pickled_error(error))
            raise
    _write(folder / name, answer)


def _load_call(file: IO[bytes]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    header = pickle.load(file)
    sys.path = header["sys_path"]
    if header["main_path"]:
        main = types.ModuleType(_MAIN)
        sys.argv = [header["main_path"]]
        main.__dict__.update(runpy.run_path(header["main_path"], run_name=_MAIN))
        sys.modules["__main__"] = sys.modules[_MAIN] = main
    return pickle.load(file)


def _pickled_value(fn: Any, value: Any) -> bytes:
    try:
        return pickle.dumps((value, None, ()))
    except Exception as error:
        explain = importlib.import_module("stratagem.messages").explain
        raise TypeError(
            explain(
                f"{fn!r} returned a {type(value).__name__} that cannot be sent back: {error}",
                expected="a value that can be pickled.",
                fix="return arrays and plain Python values.",
            )
        ) from error


def _pickled_error(error: Exception) -> bytes:
    """With the exception itself only if it survives the way."""
    lines = tuple("".join(traceback.format_exception(error)).splitlines())
    with contextlib.suppress(Exception):  # an object's own reduction may raise anything
        whole = pickle.dumps((None, error, lines))
        pickle.loads(whole)
        return whole
    return pickle.dumps((None, None, lines))


def _write(path: Path, content: bytes) -> None:
    """At once or not at all: a task can be killed at any time."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, path)


if __name__ == "__main__":
    _main()

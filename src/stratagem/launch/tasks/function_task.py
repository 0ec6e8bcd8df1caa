"""Program of a task that calls a function and writes the result to a file.

Launched tasks run this file without the package: the call contains the paths of both the package
and the function. Jobs of a cluster run it with `PROGRAM`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import os
import pickle
import runpy
import signal
import sys
import traceback
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

CALL = "stratagem_call.pickle"
"""File of the call, in the folder that is the program's first argument."""
PROGRAM = "from stratagem.launch.tasks.function_task import main; main()"
# As multiprocessing names it, so that `if __name__ == "__main__":` keeps its meaning.
_MAIN = "__mp_main__"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallResult:
    """Value or error of the call in one task.

    `error` is None if nothing was raised, or if the error cannot be pickled. `traceback` has its
    lines in both cases.
    """

    value: Any = None
    error: Exception | None = None
    traceback: tuple[str, ...] = ()


class _ScriptUnpickler(pickle.Unpickler):
    """Maps names in a task's script to names in the script here."""

    def find_class(self, module: str, name: str) -> Any:
        return super().find_class("__main__" if module == _MAIN else module, name)


def pack_call(
    call: bytes,
    *,
    path: list[str] | None = None,
    main_path: str | None = None,
    by_value: bool = False,
    sources: Mapping[str, str] | None = None,
) -> bytes:
    """Returns the content of the file `CALL`, for a pickled function with its arguments.

    None for `path` leaves the task's `sys.path` unchanged. `main_path` is the script to run first
    as the main module, if the call refers to it. `by_value` allows cloudpickle for the result.
    `sources` are texts by file name, for tracebacks, of files that the task cannot read.
    """
    header = {
        "path": path,
        "main_path": main_path,
        "by_value": by_value,
        "sources": dict(sources or {}),
    }
    return pickle.dumps(header) + call


def task_command(folder: Path) -> tuple[str, ...]:
    """Returns the command of a task, to be completed with the name of its result file."""
    # -P: modules must not be found in the folder of this file.
    return (sys.executable, "-P", __file__, str(folder))


def read_result(file: IO[bytes]) -> CallResult:
    """Reads a result, from a file that only this user can write or after checking a signature."""
    value, error, lines = _ScriptUnpickler(file).load()
    return CallResult(value=value, error=error, traceback=lines)


def is_loading_script() -> bool:
    """Returns True in a task that still runs the script that defines its function."""
    main_module, script = sys.modules["__main__"], sys.modules.get(_MAIN)
    # multiprocessing also gives the main module its second name.
    return getattr(main_module, "__file__", None) == __file__ and script not in (None, main_module)


def main() -> None:
    """Makes the call in the folder of argument 1; writes its result or error to file 2."""
    folder, name = Path(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[:1]
    dumps: Callable[[Any], bytes] = pickle.dumps
    with open(folder / CALL, "rb") as file:
        try:
            header = pickle.load(file)  # noqa: S301 - the launcher's file
            dumps = _prepare(header)
            fn, args, kwargs = pickle.load(file)  # noqa: S301 - the launcher's file
            value = fn(*args, **kwargs)
            result = _pickled_value(fn, value, dumps)
        except KeyboardInterrupt:
            _end_by_interrupt()
        except Exception as error:
            _write(folder / name, _pickled_error(error, dumps))
            raise
    _write(folder / name, result)


def _prepare(header: dict[str, Any]) -> Callable[[Any], bytes]:
    """Sets up paths and the main module; returns the function that pickles the result."""
    if header["path"] is not None:
        sys.path = header["path"]
    if header["main_path"]:
        script = types.ModuleType(_MAIN)
        sys.argv = [header["main_path"]]
        script.__dict__.update(runpy.run_path(header["main_path"], run_name=_MAIN))
        sys.modules["__main__"] = sys.modules[_MAIN] = script
    if header["sources"]:
        _remember_sources(header["sources"])
    if not header["by_value"]:
        return pickle.dumps
    from stratagem.environment import load

    return load("cloudpickle", needed_by="a function that is sent", install="cloudpickle").dumps


def _remember_sources(sources: Mapping[str, str]) -> None:
    """Makes tracebacks show the lines of cells, also those of an error that ends this process."""
    for name, text in sources.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    sys.excepthook = traceback.print_exception


def _end_by_interrupt() -> NoReturn:
    """Ends this process by SIGINT: the traceback of an interrupt says nothing about the program."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.raise_signal(signal.SIGINT)
    raise SystemExit(128 + signal.SIGINT)  # if the signal is blocked


def _pickled_value(fn: object, value: object, dumps: Callable[[Any], bytes]) -> bytes:
    try:
        return dumps((value, None, ()))
    except Exception as error:
        from stratagem.errors import explain

        raise TypeError(
            explain(
                f"{fn!r} returned a {type(value).__name__} that cannot be sent back: {error}",
                expected="a value that can be pickled.",
                fix="return arrays and plain Python values.",
                code="SG606",
            )
        ) from error


def _pickled_error(error: Exception, dumps: Callable[[Any], bytes]) -> bytes:
    """Includes the exception itself only if it survives pickling."""
    lines = tuple("".join(traceback.format_exception(error)).splitlines())
    with contextlib.suppress(Exception):  # __reduce__ may raise anything
        whole = dumps((None, error, lines))
        pickle.loads(whole)  # noqa: S301 - made in the line before
        return whole
    return dumps((None, None, lines))


def _write(path: Path, content: bytes) -> None:
    """Writes all or nothing, as a task may be killed at any time."""
    part = path.with_suffix(".part")
    part.write_bytes(content)
    os.replace(part, path)


if __name__ == "__main__":
    main()

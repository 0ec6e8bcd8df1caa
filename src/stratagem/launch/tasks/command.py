"""Command line of a script, a module or a program."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from stratagem.errors import explain


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

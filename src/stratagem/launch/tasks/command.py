"""The command line of a script, a module or a program."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from stratagem.messages import explain

__all__ = ["command_of"]


def command_of(
    script: str | os.PathLike[str], args: Sequence[str] = (), *, module: bool = False
) -> tuple[str, ...]:
    """Returns what to execute.

    Args:
        script: a Python file (`.py`), which runs on this interpreter; any other program, by its
            path or by its name on PATH; or a module.
        args: its arguments.
        module: `script` is a module's name, as in `python -m`.

    Returns:
        The program and its arguments.

    Raises:
        FileNotFoundError: no such file, program or module.
        PermissionError: a file that cannot be executed.

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
                    fix="correct the path, or pass module=True (-m) for a module.",
                )
            )
        return (sys.executable, name, *args)
    program = os.path.join(os.curdir, name) if path.is_file() and path.parent == Path() else name
    found = shutil.which(program)
    if found is None and path.is_file():
        raise PermissionError(
            explain(
                f"The file {name!r} cannot be executed.",
                expected="a Python script whose name ends in .py, or a program.",
                fix=f"chmod +x {name}, or put `python` in front of it.",
            )
        )
    if found is None:
        raise FileNotFoundError(
            explain(
                f"There is no program {name!r}, in {Path.cwd()} or on PATH.",
                expected="a Python script (.py), a program, or a module with module=True (-m).",
                fix="correct the name.",
            )
        )
    return (found, *args)


def _check_module(name: str) -> None:
    # Packages are not loaded here: what a script imports is its own affair.
    top = name.partition(".")[0]
    here = Path(top).is_dir() or Path(f"{top}.py").is_file()
    if not name or not (here or importlib.util.find_spec(top)):
        raise FileNotFoundError(
            explain(
                f"There is no module {name!r} on this interpreter's path or in {Path.cwd()}.",
                expected="a module or a package, as `python -m` takes it.",
                fix="correct the name, or leave module=True (-m) out for a file.",
            )
        )

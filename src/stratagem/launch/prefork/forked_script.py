"""Python script run as `__main__` in a forked process, as `python script.py` would run it."""

from __future__ import annotations

import builtins
import io
import json
import os
import socket
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem import environment


def script_job(argv: Sequence[str], variables: Mapping[str, str]) -> bytes:
    """Returns the job of a fork that runs a script here, with exactly these variables."""
    return json.dumps([list(argv), dict(variables), os.getcwd()]).encode()


def run_script(channel: socket.socket, changes: Mapping[str, str]) -> None:
    """Reads a job, starts a session, replies with the process id, and runs the script.

    `changes` are the variables that importing modules has set.
    """
    with channel, channel.makefile("rwb") as file:
        argv, variables, folder = json.loads(file.read(int(file.readline())))
        os.setsid()  # before the reply: the client may signal the group at once
        os.chdir(folder)
        environment.replace({**changes, **variables})
        environment.record_library_settings()
        file.write(json.dumps({"process_id": os.getpid()}).encode() + b"\n")
    _run(argv)


def _run(argv: list[str]) -> None:
    sys.argv = argv
    script = os.path.abspath(argv[0])  # as Python names it in `__file__` and in tracebacks
    if not environment.lookup("PYTHONSAFEPATH"):
        sys.path.insert(0, str(Path(script).resolve().parent))
    module: Any = types.ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = builtins
    sys.modules["__main__"] = module
    with io.open_code(script) as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    try:
        exec(code, module.__dict__)  # noqa: S102 - the script that the user gave
    except Exception as error:  # noqa: BLE001 - printed as the interpreter does
        # Without the frame of this function.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None

"""A process that has loaded JAX, Keras and this package, and becomes tasks by forking itself.

A forked task returns out of the loop that serves, and runs its script as `__main__` of this
interpreter: it ends as `python script.py` does, with everything that is done at exit. That is what
`multiprocessing`'s fork server has no place for: its children end by `os._exit`, and load the
script under another name.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import dataclasses
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.launch.task_start import tie

__all__ = ["MAX_REQUEST_BYTES", "PROGRAM", "main"]

# What the interpreter of the server is given with `-c`. The folder that it looks into for modules
# is the script's, which only the tasks know.
PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from stratagem.launch.warm_server import main; main()"
)
MAX_REQUEST_BYTES = 2**17

_PRELOADED = ("jax", "keras", "stratagem.keras", "stratagem.strategies")
# How long the end of a task goes unseen.
_POLL_S = 0.02


@dataclasses.dataclass(frozen=True)
class _Request:
    """A task to start: its script and arguments, its variables, its folder and its output."""

    argv: list[str]
    variables: dict[str, str]
    folder: str
    outputs: tuple[int, int]


def main() -> None:
    """Serves at the socket whose number is the first argument; in a task, runs that one's script.

    Raises:
        BaseException: what the script raises.
    """
    server, connection = os.getpid(), socket.socket(fileno=int(sys.argv[1]))
    before = environment.snapshot()
    for name in _PRELOADED:
        importlib.import_module(name)
    if importlib.import_module("stratagem.topology.processes").has_started():
        raise SystemExit(1)  # threads of a backend do not survive a fork
    # What is here stays where it is: tasks share these pages until they change them.
    gc.collect()
    gc.freeze()
    after = environment.snapshot()
    changes = {name: value for name, value in after.items() if before.get(name) != value}
    request = _serve(connection)
    if request is not None:
        _become(request, server, changes)
        _run_script(request.argv)


def _serve(connection: socket.socket) -> _Request | None:
    """Forks a task for each request; returns in a task, and when the launcher has gone."""
    _send(connection, {"kind": "ready"})
    running: set[int] = set()
    while True:
        if select.select([connection], [], [], _POLL_S if running else None)[0]:
            data, outputs, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
            if not data:
                return None
            has_session, tell_session = os.pipe()
            process_id = os.fork()
            if process_id == 0:
                connection.close()
                os.close(has_session)
                os.setsid()
                os.close(tell_session)
                return _Request(**json.loads(data), outputs=(outputs[0], outputs[1]))
            for output in (*outputs, tell_session):
                os.close(output)
            # The launcher may send it a signal at once, by its group.
            os.read(has_session, 1)
            os.close(has_session)
            running.add(process_id)
            _send(connection, {"kind": "started", "process_id": process_id})
        while running:
            process_id, status = os.waitpid(-1, os.WNOHANG)
            if process_id == 0:
                break
            running.discard(process_id)
            code = os.waitstatus_to_exitcode(status)
            _send(connection, {"kind": "ended", "process_id": process_id, "code": code})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher has gone; the next read says so
        connection.send(json.dumps(message).encode())


def _become(request: _Request, server: int, changes: Mapping[str, str]) -> None:
    """Makes of this fork what a task is that was started anew, and has loaded these libraries."""
    tie(server)
    signal.set_wakeup_fd(-1)
    for number, output in enumerate(request.outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    os.chdir(request.folder)
    environment.replace({**changes, **request.variables})
    environment.record_library_settings()
    # Python seeds its own generator anew in a fork, NumPy does not.
    importlib.import_module("numpy").random.seed(array.array("I", os.urandom(32)))


def _run_script(argv: list[str]) -> None:
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
        exec(code, module.__dict__)
    except Exception as error:  # noqa: BLE001 - told as the interpreter does
        # Without the lines of this file.
        trace = error.__traceback__ and error.__traceback__.tb_next
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None

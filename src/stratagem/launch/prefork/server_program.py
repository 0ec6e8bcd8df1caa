"""Program of a fork server: imports modules, then forks a process for each request.

It has a single thread and no JAX backend, so its forks are complete. A fork leaves the serving loop
and runs an object or a script; it dies with the server. `multiprocessing`'s fork server does not
fit: its children skip `atexit`, and load a script under another name.
"""

from __future__ import annotations

import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import pickle
import select
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem import environment
from stratagem.launch.tasks.tied_process import tie

# Object with an `address` and a `close()`, served until its client closes it.

CLOSE = b"close\n"


def serve_object(channel: socket.socket) -> None:
    """Makes an object, replies with its address, closes it on request, and kills this process."""
    # Output is read while the process runs.
    sys.stdout = os.fdopen(sys.stdout.fileno(), "w", buffering=1, closefd=False)
    try:
        with channel.makefile("rwb") as file:
            served = _make(file)
            if served is not None and file.readline() == CLOSE:
                served.close()
    except BaseException:  # noqa: BLE001 - raised by the object, for example on a full disk
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Do not wait for threads that are still busy.
    signal.raise_signal(signal.SIGKILL)


def serve_with(variables: Mapping[str, str], serve: Callable[..., Any], *arguments: object) -> Any:
    """Calls `serve` after setting the variables that the environment lacks."""
    environment.set_defaults(variables)
    return serve(*arguments)


def _make(file: io.BufferedRWPair) -> Any:
    """Calls the function that was sent; returns its object, or None after replying an error."""
    served: Any = None
    reply: dict[str, object]
    try:
        serve, arguments = pickle.loads(file.read(int(file.readline())))  # noqa: S301 - a pipe
        made: Any = serve(*arguments)
        served, reply = made, {"address": made.address, "process_id": os.getpid()}
    except BaseException:  # noqa: BLE001 - reported to the client
        reply = {"trace": traceback.format_exc()}
    file.write(json.dumps(reply).encode() + b"\n")
    file.flush()
    return served


# The server's `-c` argument. Its own working directory is no place to import from.
PROGRAM = (
    "import json, sys; path = json.loads(sys.argv[2])['path']; "
    "sys.path[:] = filter(None, sys.path) if path is None else path; "
    "from stratagem.launch.prefork.server_program import main; main()"
)
MAX_MESSAGE_BYTES = 2**16
_MAX_WAKEUPS = 4096
_MAX_DESCRIPTORS = 3  # a channel, and optionally stdout and stderr


def main() -> None:
    """Serves the socket whose descriptor is the first argument; returns in forks as well.

    The second argument is JSON: "path" for `sys.path` and "modules" to import.
    """
    server, connection = os.getpid(), socket.socket(fileno=int(sys.argv[1]))
    had_faulthandler = faulthandler.is_enabled()
    faulthandler.enable()
    before = environment.snapshot()
    try:
        _load(json.loads(sys.argv[2])["modules"])
    except Exception:  # noqa: BLE001 - reported to the client
        _report(connection, kind="failed", trace=traceback.format_exc()[-MAX_MESSAGE_BYTES // 4 :])
        return
    after = environment.snapshot()
    changes = {name: value for name, value in after.items() if before.get(name) != value}
    forked = _serve(connection)
    if forked is None:
        return
    kind, channel = forked
    _restore(server)
    channel.sendall(b"\n")  # that it is there; its work may take any time
    if kind == "object":
        serve_object(channel)
    else:
        if not had_faulthandler:
            faulthandler.disable()
        run_script(channel, changes)


def _load(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)
    if "jax" in sys.modules:
        from stratagem.devices.processes import has_started

        if has_started():
            raise RuntimeError("A JAX backend has started; its threads do not survive a fork.")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # else every fork would print what is buffered
    # Frozen objects stay on pages shared with all forks.
    gc.collect()
    gc.freeze()


def _serve(connection: socket.socket) -> tuple[str, socket.socket] | None:
    """Forks on request; returns kind and channel in a fork, None in the server at the end."""
    numbers: dict[int, int] = {}  # by process id
    wakeups, waker = socket.socketpair()
    for end in (wakeups, waker):
        end.settimeout(0)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    _report(connection, kind="loaded")
    while True:
        ready, _, _ = select.select([connection, wakeups], [], [])
        if wakeups in ready:
            wakeups.recv(_MAX_WAKEUPS)
            _report_exits(connection, numbers)
        if connection not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, _MAX_DESCRIPTORS)
        if not data:
            return None
        request = json.loads(data)
        if _fork(numbers, request["number"]):
            for inherited in (connection, wakeups, waker):
                inherited.close()
            channel, *outputs = descriptors
            for number, output in enumerate(outputs, start=1):
                os.dup2(output, number)
                os.close(output)
            return request["kind"], socket.socket(fileno=channel)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork(numbers: dict[int, int], number: int) -> bool:
    """Returns True in the fork. If the system refuses, the client finds its channel closed."""
    try:
        process_id = os.fork()
    except OSError:
        return False
    if process_id:
        numbers[process_id] = number
    return process_id == 0


def _report_exits(connection: socket.socket, numbers: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(end[1])
            _report(connection, kind="exited", number=numbers.pop(end[0]), code=code)


def _restore(server: int) -> None:
    """Gives a fork the state of a new process that has imported the same modules."""
    tie(server)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "numpy" in sys.modules:  # Python reseeds its own generator after a fork, NumPy does not
        sys.modules["numpy"].random.seed(list(os.urandom(32)))


def _report(connection: socket.socket, **message: object) -> None:
    with contextlib.suppress(OSError):  # the client is gone; the next read notices
        connection.send(json.dumps(message).encode())


# Python script run as `__main__` in a forked process, as `python script.py` would run it.


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

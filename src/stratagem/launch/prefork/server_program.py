"""Program of a fork server: imports modules, then forks a process for each request.

It has a single thread and no JAX backend, so its forks are complete. A fork leaves the serving loop
and runs an object or a script; it dies with the server. `multiprocessing`'s fork server does not
fit: its children skip `atexit`, and load a script under another name.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback

from stratagem import environment
from stratagem.launch.prefork.forked_object import CLOSE as CLOSE
from stratagem.launch.prefork.forked_object import serve_object
from stratagem.launch.prefork.forked_script import run_script
from stratagem.launch.tasks.tied_process import tie

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
        _report(connection, kind="forked", number=request["number"])
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

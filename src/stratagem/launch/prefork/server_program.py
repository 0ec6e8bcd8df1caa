"""A process that has loaded modules, and becomes another one by forking itself.

It has one thread and no backend of JAX, so a fork lacks nothing. The fork serves an object until it
is told to close it, and dies with the process that it was forked from.
"""

from __future__ import annotations

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
from collections.abc import Callable, Mapping
from typing import Any

from stratagem import environment
from stratagem.launch.tasks.tied_process import tie

__all__ = ["CLOSE", "MAX_MESSAGE_BYTES", "PROGRAM", "main", "serve_with"]

# What the interpreter is given with `-c`; a Ray process finds modules where its driver does.
PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from stratagem.launch.prefork.server_program import main; main()"
)
CLOSE = b"close\n"
MAX_MESSAGE_BYTES = 2**16
_MAX_WAKES = 4096
_MAX_RECEIVED = 3  # a channel, and stdout and stderr where they are not those of this process


def main() -> None:
    """Serves at the socket whose number is the first argument; in a fork, serves an object.

    The second argument is `sys.path`, the third the names of the modules to load, both as JSON.
    """
    server, connection = os.getpid(), socket.socket(fileno=int(sys.argv[1]))
    faulthandler.enable()
    # What is printed is read while this runs.
    sys.stdout = os.fdopen(sys.stdout.fileno(), "w", buffering=1, closefd=False)
    try:
        _load(json.loads(sys.argv[3]))
    except Exception:  # noqa: BLE001 - told to who has started it
        _tell(connection, kind="failed", trace=traceback.format_exc()[-MAX_MESSAGE_BYTES // 4 :])
        return
    channel = _serve(connection, server)
    if channel is not None:
        _serve_object(channel)


def serve_with(variables: Mapping[str, str], serve: Callable[..., Any], *arguments: Any) -> Any:
    """Serves an object in a fork, after setting variables that its environment lacks."""
    environment.set_defaults(variables)
    return serve(*arguments)


def _load(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)
    if "jax" in sys.modules:
        processes = importlib.import_module("stratagem.topology.processes")
        if processes.has_started():
            raise RuntimeError("A backend of JAX has started, whose threads do not survive a fork.")
    # What is here stays where it is: forks share these pages until they change them.
    gc.collect()
    gc.freeze()


def _serve(connection: socket.socket, server: int) -> socket.socket | None:
    """Forks when it is sent a number; returns the channel in a fork, and at the end None."""
    numbers: dict[int, int] = {}  # by process id
    woken, waker = socket.socketpair()
    for end in (woken, waker):
        end.settimeout(0)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    _tell(connection, kind="ready")
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            woken.recv(_MAX_WAKES)
            _tell_ends(connection, numbers)
        if connection not in ready:
            continue
        request, received, _, _ = socket.recv_fds(connection, MAX_MESSAGE_BYTES, _MAX_RECEIVED)
        if not request:
            return None
        process_id = os.fork()
        if process_id == 0:
            for inherited in (connection, woken, waker):
                inherited.close()
            channel, *outputs = received
            for number, output in enumerate(outputs, start=1):
                os.dup2(output, number)
                os.close(output)
            _become(server)
            return socket.socket(fileno=channel)
        numbers[process_id] = int(request)
        for descriptor in received:
            os.close(descriptor)


def _tell_ends(connection: socket.socket, numbers: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(end[1])
            _tell(connection, kind="ended", number=numbers.pop(end[0]), code=code)


def _become(server: int) -> None:
    """Makes of this fork what a process is that was started anew, and has loaded these modules."""
    tie(server)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "numpy" in sys.modules:  # Python seeds its own generator anew in a fork, NumPy does not
        sys.modules["numpy"].random.seed(list(os.urandom(32)))


def _serve_object(channel: socket.socket) -> None:
    """Makes an object, tells its address, and closes it when told to; then ends at once."""
    try:
        with channel.makefile("rwb") as file:
            served = _made(file)
            if served is not None and file.readline() == CLOSE:
                served.close()
    except BaseException:  # noqa: BLE001 - of the object, such as a disk that is full
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Threads that are still at work are not waited for.
    signal.raise_signal(signal.SIGKILL)


def _made(file: io.BufferedRWPair) -> Any:
    """Returns what the function returns that is sent; None where it cannot be made."""
    try:
        serve, arguments = pickle.loads(file.read(int(file.readline())))
        served = serve(*arguments)
        told = {"address": served.address, "process_id": os.getpid()}
    except BaseException:  # noqa: BLE001 - told to who has started it
        served, told = None, {"trace": traceback.format_exc()}
    file.write(json.dumps(told).encode() + b"\n")
    file.flush()
    return served


def _tell(connection: socket.socket, **message: Any) -> None:
    with contextlib.suppress(OSError):  # who is told has gone; the next read says so
        connection.send(json.dumps(message).encode())

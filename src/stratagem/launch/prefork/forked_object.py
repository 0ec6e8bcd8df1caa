"""Object served by a forked process until its client closes it."""

from __future__ import annotations

import io
import json
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from stratagem import environment

CLOSE = b"close\n"


class ServedObject(Protocol):
    """Object that a forked process makes and serves."""

    @property
    def address(self) -> str:
        """Address for clients."""
        ...

    def close(self) -> None:
        """Stops serving and releases resources."""
        ...


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


def serve_with(
    variables: Mapping[str, str], serve: Callable[..., ServedObject], *arguments: object
) -> ServedObject:
    """Calls `serve` after setting the variables that the environment lacks."""
    environment.set_defaults(variables)
    return serve(*arguments)


def _make(file: io.BufferedRWPair) -> ServedObject | None:
    """Calls the function that was sent; returns its object, or None after replying an error."""
    served: ServedObject | None = None
    reply: dict[str, object]
    try:
        serve, arguments = pickle.loads(file.read(int(file.readline())))  # noqa: S301 - a pipe
        made: ServedObject = serve(*arguments)
        served, reply = made, {"address": made.address, "process_id": os.getpid()}
    except BaseException:  # noqa: BLE001 - reported to the client
        reply = {"trace": traceback.format_exc()}
    file.write(json.dumps(reply).encode() + b"\n")
    file.flush()
    return served

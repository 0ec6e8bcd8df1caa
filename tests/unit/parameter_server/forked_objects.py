"""What the processes of the tests serve: functions that Ray's processes import by name."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.server import ParameterServer


def serve_parameters(index: int, keys: ClusterKeys) -> ParameterServer:
    return ParameterServer(keys)


class Told:
    """Tells about its process to whoever asks, and leaves a file when it is closed."""

    def __init__(self, index: int, keys: ClusterKeys, folder: str) -> None:
        self._index, self._folder = index, folder
        self._had_jax = "jax" in sys.modules
        print(f"process {index} serves {folder}", flush=True)
        self._listener = Listener(keys, self._answer)

    @property
    def address(self) -> str:
        return self._listener.addresses

    def close(self) -> None:
        self._listener.close()
        Path(self._folder, f"closed-{self._index}").write_text(str(os.getpid()))

    def _answer(self, request: Request) -> None:
        names = request.message.fields["variables"]
        fields: dict[str, Any] = {
            "index": self._index,
            "pid": os.getpid(),
            "had_jax": self._had_jax,
            "variables": {name: os.environ.get(name) for name in names},
        }
        request.answer(Message("told", fields))


serve_told = Told


def serve_late(index: int, keys: ClusterKeys, folder: str) -> Told:
    """Fails in process 1; serves in process 0, a second later."""
    if index == 1:
        raise LookupError(f"no data for process {index}")
    time.sleep(1.0)
    return Told(index, keys, folder)


def serve_nothing(index: int) -> Any:
    raise LookupError(f"no data for process {index}")


def serve_once(index: int, keys: ClusterKeys, folder: str) -> ParameterServer:
    """Starts the first time, and never again."""
    mark = Path(folder, "started")
    with mark.open("a") as file:
        file.write("x")
    if len(mark.read_text()) > 1:
        raise LookupError("no second time")
    return ParameterServer(keys)


def die(index: int) -> Any:
    os.kill(os.getpid(), 9)


def serve_at(index: int, keys: ClusterKeys, host: str) -> ParameterServer:
    return ParameterServer(keys, host=host)


def serve_after(index: int, keys: ClusterKeys, delay_s: float) -> ParameterServer:
    threading.Event().wait(delay_s)
    return ParameterServer(keys)


class Nowhere:
    """Serves nothing, at no address."""

    address = "nowhere"

    def close(self) -> None:
        pass


def serve_and_complain(index: int) -> Nowhere:
    print("a complaint", file=sys.stderr)
    return Nowhere()

"""Ours: arrays over the connections of parameter servers, to a process of their own."""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.workers.call_times import answer_calls, values_of
from benchmarks.workers.protocol import serve_questions
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message

__all__ = ["prepare"]


class _Open(ClusterKeys):
    """Keys that nobody uses: to see what encryption costs."""

    def lock(self, socket: Any) -> None:
        pass

    def unlock(self, socket: Any) -> None:
        pass


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the other process; answers how long calls take."""
    keys = (ClusterKeys if json.loads(sys.argv[1])["is_encrypted"] else _Open).make()
    context = multiprocessing.get_context("spawn")
    told, telling = context.Pipe(duplex=False)
    context.Process(target=_listen, args=(keys, telling), daemon=True).start()
    connections = Connections(keys, [told.recv()])

    def pull(size: int) -> np.ndarray[Any, Any]:
        return connections.ask(0, Message("pull", {"size": size})).arrays[0]

    def push(values: np.ndarray[Any, Any]) -> float:
        return connections.ask(0, Message("push", {}, [values])).fields["last"]

    return answer_calls(pull, push)


def _listen(keys: ClusterKeys, telling: Any) -> None:
    held = functools.lru_cache(maxsize=1)(values_of)

    def handle(request: Request) -> None:
        if request.message.kind == "pull":
            request.answer(Message("ok", arrays=[held(request.message.fields["size"])]))
        else:
            (values,) = request.message.arrays
            request.answer(Message("ok", {"last": float(values[-1])}))

    listener = Listener(keys, handle)
    telling.send(listener.address)
    multiprocessing.Event().wait()


if __name__ == "__main__":
    serve_questions(prepare)

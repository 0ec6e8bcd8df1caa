"""Members of one group in threads of one process, for tests without JAX."""

from __future__ import annotations

import concurrent.futures
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from stratagem.frames import frame
from stratagem.process_group import Group, GroupLimits, Identity

_LIMIT_S = 20.0


def free_port() -> int:
    """Returns an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def identity(index: int, count: int, port: int, **same: Any) -> Identity:
    """Identity of member `index` of `count` on this host."""
    labels = tuple(f"worker {i} (host{i}:1)" for i in range(count))
    return Identity(index, labels, "127.0.0.1", port, dict(same))


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Calls a function in `count` threads; returns each result or exception."""
    with concurrent.futures.ThreadPoolExecutor(count) as executor:
        futures = [executor.submit(act, index) for index in range(count)]
        return [future.exception() or future.result() for future in futures]


def joined(count: int, limits: GroupLimits) -> list[Group]:
    """Creates `count` members and waits until they have joined."""
    port = free_port()
    return together(count, lambda index: Group(identity(index, count, port), limits))


def as_bytes(message: dict[str, Any] | bytes) -> bytes:
    """Encodes a message as a frame; returns bytes unchanged."""
    return message if isinstance(message, bytes) else frame(message)


@contextmanager
def connected(port: int, *messages: dict[str, Any] | bytes) -> Iterator[socket.socket]:
    """A connection to process 0, after sending these messages or raw bytes."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        try:
            connection = socket.create_connection(("127.0.1.1", port), _LIMIT_S)
            break
        except ConnectionRefusedError:  # it does not listen yet
            assert time.monotonic() < deadline
            time.sleep(0.01)
    with connection:
        for message in messages:
            connection.sendall(as_bytes(message))
        yield connection


def hello(index: int, count: int, **facts: Any) -> dict[str, Any]:
    """The first message of member `index` of `count`."""
    said = {"host": "h", "pid": 1, "address": "127.0.0.1", "same": {}, **facts}
    return {"kind": "hello", "process_id": index, "num_processes": count, "facts": said}

"""Several members of one group in threads of one process: for all that needs no JAX."""

from __future__ import annotations

import concurrent.futures
import socket
from collections.abc import Callable
from typing import Any

from stratagem.group import Group, Identity, Limits


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def identity(index: int, count: int, port: int, **same: Any) -> Identity:
    """Member `index` of `count`, which meet on this host."""
    labels = tuple(f"worker {i} (host{i}:1)" for i in range(count))
    return Identity(index, labels, "127.0.0.1", port, dict(same))


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Calls a function in as many threads; returns what each returned or raised."""
    with concurrent.futures.ThreadPoolExecutor(count) as executor:
        futures = [executor.submit(act, index) for index in range(count)]
        return [future.exception() or future.result() for future in futures]


def joined(count: int, limits: Limits) -> list[Group]:
    """As many members that have joined."""
    port = free_port()
    return together(count, lambda index: Group(identity(index, count, port), limits))

"""Members of one group in threads of one process, for tests without JAX."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from stratagem.cluster.addresses import free_ports
from stratagem.group.authentication.connections import frame
from stratagem.group.current import Identity
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.unit.group.authentication.peers import dialed, key, prove


def free_port() -> int:
    """Returns an unused port."""
    return free_ports(1)[0]


def identity(index: int, count: int, port: int, **same: Any) -> Identity:
    """Identity of member `index` of `count` on this host."""
    labels = tuple(f"worker {i} (host{i}:1)" for i in range(count))
    return Identity(index, labels, "127.0.0.1", port, dict(same))


def listed(index: int, ports: Sequence[int]) -> Identity:
    """Identity of a member of a cluster that lists the ports of all."""
    one = identity(index, len(ports), ports[0])
    return dataclasses.replace(one, addresses=tuple(("127.0.0.1", port) for port in ports))


def end_joining(limits: GroupLimits, waited_s: float = 0.0) -> None:
    """Ends the wait of members with these limits for those that have not joined.

    Process 0 reports it first, unless a member has waited two seconds longer than `waited_s`.
    """
    object.__setattr__(limits, "join_s", waited_s)


def together(count: int, act: Callable[[int], Any]) -> list[Any]:
    """Calls a function in `count` threads; returns each result or exception."""
    with concurrent.futures.ThreadPoolExecutor(count) as executor:
        futures = [executor.submit(act, index) for index in range(count)]
        return [future.exception() or future.result() for future in futures]


def joined(count: int, limits: GroupLimits) -> list[Group]:
    """Creates `count` members and waits until they have joined."""
    port = free_port()
    return together(count, lambda index: Group(identity(index, count, port), limits))


@contextmanager
def running(count: int, limits: GroupLimits) -> Iterator[list[Group]]:
    """Joined members, which are abandoned at the end."""
    groups = joined(count, limits)
    try:
        yield groups
    finally:
        for group in groups:
            group.abandon()


def as_bytes(message: dict[str, Any] | bytes) -> bytes:
    """Encodes a message as a frame; returns bytes unchanged."""
    return message if isinstance(message, bytes) else frame(message)


@contextmanager
def connected(port: int, *messages: dict[str, Any] | bytes, claim: str) -> Iterator[socket.socket]:
    """A connection to process 0 of a group without a secret, after sending messages or bytes."""
    with dialed(port) as connection:
        prove(connection, key("group"), claim)
        for message in messages:
            connection.sendall(as_bytes(message))
        yield connection


def hello(index: int, count: int, **facts: Any) -> dict[str, Any]:
    """The first message of member `index` of `count`."""
    said = {"host": "h", "pid": 1, "address": "127.0.0.1", "same": {}, **facts}
    return {
        "kind": "hello",
        "process_id": index,
        "num_processes": count,
        "restart": 0,
        "facts": said,
    }

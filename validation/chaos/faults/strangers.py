"""Strangers that connect to the ports of a job: garbage, and slow-loris."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene

__all__ = ["KINDS"]

_CONNECT_S = 2.0
_LORIS_S = 12.0
_NUM_LORIS = 40
_GARBAGE_BYTES = 2**22


def _payloads(scene: Scene) -> list[bytes]:
    """What programs and attackers say first: HTTP, JSON without end, sizes beyond all memory."""
    return [
        scene.chance.randbytes(_GARBAGE_BYTES),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 1000,
        b'{"kind": "hello", "rank": 1, "x": "' + b"A" * _GARBAGE_BYTES,
        b"\xff" * _GARBAGE_BYTES,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + scene.chance.randbytes(9000),
        b"\xff" + bytes(8) + b"\x7f\x03\x01NULL".ljust(23, b"\0") + b"\x06" + b"\xff" * 8,
        b"",
    ]


def _garbage(scene: Scene) -> Fault:
    ports = scene.job.ports()
    for name in sorted(ports):
        for payload in _payloads(scene):
            with contextlib.suppress(OSError):
                _send(ports[name], payload, resets=scene.chance.random() < 0.5)
    return _fault("garbage", ports)


def _send(address: tuple[str, int], payload: bytes, *, resets: bool) -> None:
    with socket.create_connection(address, timeout=_CONNECT_S) as connection:
        connection.settimeout(_CONNECT_S)
        connection.sendall(payload)
        if resets:
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)


def _slow_loris(scene: Scene) -> Fault:
    ports = scene.job.ports()
    over = threading.Event()
    for name in sorted(ports):
        threading.Thread(target=_drip, args=(ports[name], over), daemon=True).start()
    return _fault("slow-loris", ports, over.set)


def _drip(address: tuple[str, int], over: threading.Event) -> None:
    with contextlib.ExitStack() as stack:
        connections: list[socket.socket] = []
        for _ in range(_NUM_LORIS):
            with contextlib.suppress(OSError):
                connection = socket.create_connection(address, timeout=_CONNECT_S)
                connections.append(stack.enter_context(connection))
        while not over.wait(0.5):
            for connection in connections:
                with contextlib.suppress(OSError):
                    connection.send(b"1")


def _fault(kind: str, ports: dict[str, tuple[str, int]], lift: object = None) -> Fault:
    if not ports:
        raise NotHereError("nothing listens")
    return Fault(
        kind=kind,
        where=", ".join(sorted(ports)),
        lift=lift if callable(lift) else None,
        lasts_s=_LORIS_S,
    )


KINDS = (FaultKind("garbage", _garbage), FaultKind("slow-loris", _slow_loris))

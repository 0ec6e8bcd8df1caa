"""Both sides of the handshake, written apart from the library's."""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time

MODE = b"SGauth1\n"
_LIMIT_S = 120.0


def key(purpose: str, secret: str = "") -> bytes:
    """Returns the key that a secret gives for a purpose."""
    return hmac.new(secret.encode(), f"stratagem 1 {purpose}".encode(), hashlib.sha256).digest()


def received(connection: socket.socket, size: int) -> bytes:
    """Returns `size` bytes, or fewer if the other side closes."""
    data = b""
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return data


def is_closed(connection: socket.socket) -> bool:
    """True if the other side has closed, and False if nothing has arrived."""
    connection.settimeout(0)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except BlockingIOError:
        return False


def opening(claim: str, nonce: bytes, mode: bytes = MODE) -> bytes:
    """Returns the first message of a client."""
    return mode + nonce + bytes([len(claim)]) + claim.encode() + b"\r\n\r\n"


def proof(side: str, key: bytes, nonces: bytes, claim: str, mode: bytes = MODE) -> bytes:
    """Returns the proof of one side, "client" or "server"."""
    return hmac.new(key, side.encode() + mode + nonces + claim.encode(), hashlib.sha256).digest()


def dialed(port: int, host: str = "127.0.0.1") -> socket.socket:
    """Returns a connection, once something listens."""
    deadline = time.monotonic() + _LIMIT_S
    while True:
        try:
            return socket.create_connection((host, port), _LIMIT_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def prove(connection: socket.socket, key: bytes, claim: str) -> bytes:
    """Does the handshake; returns the server's answer: b"" or a byte, and its proof."""
    nonce = os.urandom(32)
    connection.sendall(opening(claim, nonce))
    answer = received(connection, 40)
    assert answer[:8] == MODE
    nonces = nonce + answer[8:]
    connection.sendall(proof("client", key, nonces, claim))
    accepted = received(connection, 33)
    if accepted[:1] == b"\1":
        assert accepted[1:] == proof("server", key, nonces, claim)
    return accepted


def admit(connection: socket.socket, key: bytes) -> str:
    """Does the handshake of a server with a client that has the key; returns its claim."""
    start = received(connection, 41)
    claim = received(connection, start[40]).decode()
    assert (start[:8], received(connection, 4)) == (MODE, b"\r\n\r\n")
    nonces = start[8:40] + os.urandom(32)
    connection.sendall(MODE + nonces[32:])
    assert received(connection, 32) == proof("client", key, nonces, claim)
    connection.sendall(b"\1" + proof("server", key, nonces, claim))
    return claim

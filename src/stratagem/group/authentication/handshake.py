"""Proof of the secret on both sides of a new connection, before anything else is read.

1. client: mode, nonce of the client, claim (its role and rank), end of a line
2. server: mode, nonce of the server
3. client: HMAC of "client", mode, both nonces and the claim
4. server: accepted or refused, and the HMAC of "server" and the same

A replayed proof has an old nonce, and a reflected one the wrong side. All lengths are fixed or
bounded; the server reads less than 400 bytes.

Source: RFC 2104 (HMAC); ISO/IEC 9798-4, mutual authentication by a cryptographic check function.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import socket

from stratagem.cluster.addresses import join_address
from stratagem.messages import explain

PLAIN, TLS = b"SGauth1\n", b"SGauthT\n"
"""Modes: what follows the handshake."""
_NONCE_BYTES = _PROOF_BYTES = 32
# A web server that has taken the port answers a whole line at once, and is noticed by that.
_LINE_END = b"\r\n\r\n"
_REFUSED, _ACCEPTED = b"\0", b"\1"


async def admit(connection: socket.socket, key: bytes, mode: bytes) -> str | None:
    """Returns the claim of a client that proves the key; None for any other.

    The socket is not blocking. Raises OSError if the connection ends.
    """
    theirs = await _receive(connection, len(mode))
    if theirs not in (PLAIN, TLS):
        return None
    nonce = await _receive(connection, _NONCE_BYTES)
    (length,) = await _receive(connection, 1)
    claim = await _receive(connection, length)
    line_end = await _receive(connection, len(_LINE_END))
    own_nonce = secrets.token_bytes(_NONCE_BYTES)
    await _send(connection, mode + own_nonce)
    if line_end != _LINE_END or theirs != mode:
        return None
    spoken = mode + nonce + own_nonce + claim
    proof = await _receive(connection, _PROOF_BYTES)
    if not hmac.compare_digest(proof, _proof(key, b"client", spoken)):
        await _send(connection, _REFUSED)
        return None
    await _send(connection, _ACCEPTED + _proof(key, b"server", spoken))
    with contextlib.suppress(UnicodeDecodeError):
        return claim.decode("ascii")
    return None


async def prove(
    connection: socket.socket, key: bytes, mode: bytes, claim: str, *, server: str
) -> None:
    """Proves the key to a server, and requires the same of it.

    `server` names it in messages. Raises OSError if the connection ends, ValueError if the server
    is another program, has another key or another mode.
    """
    host, port = connection.getpeername()[:2]  # unknown once the other side has closed
    words = claim.encode("ascii")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    await _send(connection, mode + nonce + bytes([len(words)]) + words + _LINE_END)
    theirs = await _receive_some(connection, len(mode))
    if theirs not in (PLAIN, TLS):
        raise _other_program(server, host, port)
    if theirs != mode:
        raise _other_mode(server, is_encrypted=theirs == TLS)
    spoken = mode + nonce + await _receive(connection, _NONCE_BYTES) + words
    await _send(connection, _proof(key, b"client", spoken))
    if await _receive(connection, 1) == _ACCEPTED:
        proof = await _receive(connection, _PROOF_BYTES)
        if hmac.compare_digest(proof, _proof(key, b"server", spoken)):
            return
    raise ValueError(
        explain(
            f"{server} and this process do not have the same secret.",
            expected="one secret for all processes of a run.",
            fix="set the same STRATAGEM_SECRET everywhere, or stop the earlier run that uses this "
            "port.",
            code="SG516",
        )
    )


def _proof(key: bytes, side: bytes, spoken: bytes) -> bytes:
    return hmac.digest(key, side + spoken, hashlib.sha256)


async def _send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def _receive(connection: socket.socket, size: int) -> bytes:
    data = await _receive_some(connection, size)
    if len(data) < size:
        raise ConnectionError("the connection closed during the handshake")
    return data


async def _receive_some(connection: socket.socket, size: int) -> bytes:
    """Returns less than `size` bytes only if the other side closes after the first."""
    data = bytearray()
    with contextlib.suppress(ConnectionError):  # a reset is an end, too
        while len(data) < size and (
            part := await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        ):
            data += part
    if size and not data:
        raise ConnectionError("the connection closed during the handshake")
    return bytes(data)


def _other_program(server: str, host: str, port: int) -> ValueError:
    return ValueError(
        explain(
            f"Another program has taken port {port} of {server}: it answers at "
            f"{join_address(host, port)}.",
            expected="a free port on the host of process 0.",
            fix="choose another port in the cluster, or stop that program.",
            code="SG509",
        )
    )


def _other_mode(server: str, *, is_encrypted: bool) -> ValueError:
    sides = (server, "this process")
    encrypted, plain = sides if is_encrypted else sides[::-1]
    return ValueError(
        explain(
            f"Only {encrypted} uses TLS, and {plain} does not.",
            expected="TLS on all processes of a run, or on none.",
            fix="set STRATAGEM_TLS_DIR everywhere, or nowhere.",
            code="SG516",
        )
    )

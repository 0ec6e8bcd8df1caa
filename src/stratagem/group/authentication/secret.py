"""Secret that the processes of a run share; all keys are derived from it.

Source: RFC 5869 (HKDF): one key per purpose, so that no port can be used against another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import os
import secrets
import socket
import ssl
import stat
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import final

from stratagem import environment, settings
from stratagem.cluster.addresses import is_loopback, join_address
from stratagem.errors import explain, invalid
from stratagem.resources import Closing

_VARIABLE, _FILE_VARIABLE = "STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE"
_MIN_LENGTH = 32
_MAKE = (
    "make one secret for the whole run, stratagem secret --file run.secret, and set "
    "STRATAGEM_SECRET_FILE to a copy of it on every host"
)


@final
class Secret:
    """A secret text. Raises ValueError if it is too short; `source` names its origin in errors."""

    def __init__(self, text: str, source: str = _VARIABLE) -> None:
        if len(text) < _MIN_LENGTH:
            raise invalid(
                f"{source} has a secret of {len(text)} characters.",
                expected=f"at least {_MIN_LENGTH}, which cannot be guessed.",
                fix=f"make one: {_MAKE}.",
                code="SG515",
            )
        self.text = text

    def __repr__(self) -> str:
        return "Secret(...)"  # messages are logged

    def key(self, purpose: str) -> bytes:
        """Returns 32 bytes for one purpose, the same in all processes."""
        return key_of(self, purpose)

    def variables(self) -> dict[str, str]:
        """Returns the environment variables that hand the secret to another process."""
        return {_VARIABLE: self.text}


def key_of(secret: Secret | None, purpose: str) -> bytes:
    """Returns the key for a purpose; without a secret, one that everybody can compute."""
    text = "" if secret is None else secret.text
    return hmac.digest(text.encode(), b"stratagem 1 " + purpose.encode(), hashlib.sha256)


def new_secret() -> str:
    """Returns a random secret of 256 bits, as text."""
    return secrets.token_hex(32)


def find_secret() -> Secret | None:
    """Returns the secret of this run, from `STRATAGEM_SECRET` or `STRATAGEM_SECRET_FILE`.

    Returns None without either. Raises ValueError if the secret is too short, or its file cannot be
    read or may be read by others.
    """
    text = environment.lookup(_VARIABLE)
    if text is not None:
        return Secret(text)
    name = environment.lookup(_FILE_VARIABLE)
    return None if name is None else Secret(_read(Path(name).expanduser()), f"The file {name}")


def _read(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            status = os.fstat(file.fileno())
            mode = stat.S_IMODE(status.st_mode)
            is_own = status.st_uid in (os.getuid(), 0)
            if is_own and not mode & 0o077:
                return file.read().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise invalid(
            f"The secret in {path} cannot be read: {error}.",
            expected=f"the text file that {_FILE_VARIABLE} names.",
            fix=f"make one: stratagem secret --file {path}",
            code="SG515",
        ) from error
    raise invalid(
        f"The secret in {path} has mode {mode:04o} and belongs to user {status.st_uid}: others "
        "can read or change it.",
        expected="mode 0600, and this user as its owner.",
        fix=f"chmod 0600 {path}; make a new secret if others may have read it.",
        code="SG515",
    )


def required_secret(
    who: str, hosts: Iterable[str], *, allow_unauthenticated: bool = False
) -> Secret | None:
    """Returns the secret of this run; None without one on loopback, or if that is allowed.

    `who` is this process in messages, `hosts` are those of the run. Without a secret, only loopback
    addresses are accepted, unless `allow_unauthenticated` or `STRATAGEM_ALLOW_UNAUTHENTICATED` is
    set, which warns once. Raises ValueError as `find_secret`, and if there is no secret.
    """
    secret = find_secret()
    others = sorted({host for host in hosts if not is_loopback(host)})
    if secret is not None or not others:
        return secret
    if not (allow_unauthenticated or settings.read("allow_unauthenticated")):
        raise invalid(
            f"{who} has no secret, and the run uses the network: {_listed(others)}.",
            expected="a secret that all processes of the run share, since strangers could "
            "join otherwise.",
            fix=f"{_MAKE}. On a network that only this run can reach, "
            "STRATAGEM_ALLOW_UNAUTHENTICATED=1 does without.",
            code="SG515",
        )
    _warn_once()
    return None


def _listed(hosts: list[str]) -> str:
    more = len(hosts) - 3
    return ", ".join(hosts[:3]) + (f" and {more} more" if more > 0 else "")


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        explain(
            "This run has no secret: any program that reaches its ports can join it.",
            expected="a secret that all processes of the run share.",
            fix=f"{_MAKE}; then drop allow_unauthenticated.",
            code="SG515",
        ),
        stacklevel=2,
    )


def with_secret(base: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for child processes, with a new secret if they have none."""
    given = base.get(_VARIABLE, "").strip() or base.get(_FILE_VARIABLE, "").strip()
    return dict(base) if given else {**base, _VARIABLE: new_secret()}


def ray_token_file() -> Path:
    """Returns the file in which Ray looks for a token unless a variable names another."""
    return Path.home() / ".ray" / "auth_token"


def has_ray_token(base: Mapping[str, str]) -> bool:
    """Returns True if a process with these variables finds a token for Ray."""
    named = (base.get(name, "").strip() for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    return any(named) or ray_token_file().exists()


def read_ray_token(base: Mapping[str, str]) -> str:
    """Returns the token of Ray that a process with these variables finds; "" without one."""
    if token := base.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = base.get("RAY_AUTH_TOKEN_PATH", "").strip()
    try:
        file = Path(named).expanduser() if named else ray_token_file()
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def with_ray_token(base: Mapping[str, str]) -> dict[str, str]:
    """Returns variables for child processes, with a new token if they start Ray without one."""
    has_own_ray = base.get("RAY_ADDRESS", "").strip()  # it has a token of its own, or none
    is_off = base.get("RAY_AUTH_MODE", "").strip() == "disabled"
    if has_own_ray or is_off or has_ray_token(base):
        return dict(base)
    return {**base, "RAY_AUTH_TOKEN": new_secret()}


# Proof of the secret on both sides of a new connection, before anything else is read.
#
# 1. client: mode, nonce of the client, claim (its role and rank), end of a line
# 2. server: mode, nonce of the server
# 3. client: HMAC of "client", mode, both nonces and the claim
# 4. server: accepted or refused, and the HMAC of "server" and the same
#
# A replayed proof has an old nonce, and a reflected one the wrong side. All lengths are fixed or
# bounded; the server reads less than 400 bytes.
#
# Source: RFC 2104 (HMAC); ISO/IEC 9798-4, mutual authentication by a cryptographic check function.

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
    raise invalid(
        f"{server} and this process do not have the same secret.",
        expected="one secret for all processes of a run.",
        fix="set the same STRATAGEM_SECRET everywhere, or stop the earlier run that uses this "
        "port.",
        code="SG516",
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
    return invalid(
        f"Another program has taken port {port} of {server}: it answers at "
        f"{join_address(host, port)}.",
        expected="a free port on the host of process 0.",
        fix="choose another port in the cluster, or stop that program.",
        code="SG509",
    )


def _other_mode(server: str, *, is_encrypted: bool) -> ValueError:
    sides = (server, "this process")
    encrypted, plain = sides if is_encrypted else sides[::-1]
    return invalid(
        f"Only {encrypted} uses TLS, and {plain} does not.",
        expected="TLS on all processes of a run, or on none.",
        fix="set STRATAGEM_TLS_DIR everywhere, or nowhere.",
        code="SG516",
    )


# Secret and certificates of a process.


@dataclasses.dataclass(frozen=True)
class Certificates:
    """TLS in both directions: a process accepts all certificates of the authority."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    @staticmethod
    def find() -> Certificates | None:
        """Returns those in `STRATAGEM_TLS_DIR`, or None without; ValueError if they are invalid."""
        name = settings.read("tls_dir")
        if not name:
            return None
        folder = Path(name).expanduser()
        try:
            sides = (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER)
            client, server = (_context(side, folder) for side in sides)
        except OSError as error:  # errors of TLS among them
            raise invalid(
                f"TLS cannot be set up with STRATAGEM_TLS_DIR={name!r}: {error}.",
                expected="a folder with tls.crt, its private key tls.key, and ca.crt, the "
                "authority that signed the certificates of all processes.",
                fix="correct the folder, or unset the variable.",
                code="SG516",
            ) from error
        return Certificates(client, server)


def _context(side: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The authority signs for the processes of this cluster alone, at whatever address they are.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(folder / "ca.crt")
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return context


@dataclasses.dataclass(frozen=True)
class Credentials:
    """Proof that a process belongs to its run; without a secret, any process can give it."""

    secret: Secret | None = None
    certificates: Certificates | None = None

    @staticmethod
    def find(who: str, hosts: Iterable[str], *, allow_unauthenticated: bool = False) -> Credentials:
        """Returns those of this process; the arguments and errors are of `required_secret`."""
        secret = required_secret(who, hosts, allow_unauthenticated=allow_unauthenticated)
        return Credentials(secret, Certificates.find())

    def key(self, purpose: str) -> bytes:
        """Returns the key for one kind of connection."""
        return key_of(self.secret, purpose)

    @property
    def mode(self) -> bytes:
        """Mode of the handshake."""
        return PLAIN if self.certificates is None else TLS


# Listener that lets only holders of the secret in, in a thread of its own.

# After a handshake was cut short to make room: bounds the CPU time that a flood takes.
_PAUSE_S = 0.01
_CLOSE_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandshakeLimits:
    """Limits on connections that have not proved the secret yet: of a port, and of an address."""

    timeout_s: float = 10.0
    total: int = 256
    per_address: int = 64

    @staticmethod
    def find() -> HandshakeLimits:
        """Returns those of the settings."""
        return HandshakeLimits(
            timeout_s=settings.read("handshake_timeout_s"),
            total=settings.read("max_handshakes"),
            per_address=settings.read("max_handshakes_per_address"),
        )


class Gate(Closing):
    """Accepts connections and hands over those that prove the secret.

    `on_admitted` is called in the gate's thread with a socket that is not blocking, and with the
    claim of its client. Beyond the limits the oldest handshake is cut short, so that idle
    connections do not keep members out. Closing it closes the listeners.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        credentials: Credentials,
        on_admitted: Callable[[socket.socket, str], None],
        *,
        purpose: str,
        limits: HandshakeLimits | None = None,
    ) -> None:
        self._listeners = listeners
        self._key = credentials.key(purpose)
        self._mode = credentials.mode
        self._on_admitted = on_admitted
        self._limits = limits or HandshakeLimits.find()
        self._handshakes: dict[asyncio.Task[str | None], str] = {}  # the oldest first
        self._is_closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="stratagem-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening, and closes connections that were not handed over."""
        if not self._is_closing:  # a second stop would interrupt the end of handshakes
            self._is_closing = True
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        for one in self._listeners:
            one.settimeout(0)
            self._listen(one)
        try:
            self._loop.run_forever()
        finally:
            for listener in self._listeners:
                self._loop.remove_reader(listener)
                listener.close()
            self._loop.run_until_complete(self._cut_short())
            self._loop.close()

    def _listen(self, listener: socket.socket) -> None:
        if not self._is_closing:
            self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        """Accepts a connection. A coroutine that is cancelled might lose it unclosed."""
        try:
            connection, address = listener.accept()
        except BlockingIOError:  # the client has gone
            return
        except OSError:  # no descriptor is free, or the connection has ended already
            self._make_room(listener, next(iter(self._handshakes), None))
            return
        connection.settimeout(0)
        task = self._loop.create_task(self._shake_hands(connection))
        self._handshakes[task] = str(address[0])
        task.add_done_callback(functools.partial(self._finish, connection))
        if (oldest := self._excess(str(address[0]))) is not None:
            self._make_room(listener, oldest)

    def _excess(self, address: str) -> asyncio.Task[str | None] | None:
        """Returns the handshake to cut short, if there are too many."""
        limits, of_address = self._limits, Counter(self._handshakes.values())[address]
        if of_address > limits.per_address:
            return next(task for task, one in self._handshakes.items() if one == address)
        return next(iter(self._handshakes)) if len(self._handshakes) > limits.total else None

    def _make_room(self, listener: socket.socket, oldest: asyncio.Task[str | None] | None) -> None:
        if oldest is not None:
            oldest.cancel()
        self._loop.remove_reader(listener)
        self._loop.call_later(_PAUSE_S, self._listen, listener)

    async def _cut_short(self) -> None:
        """Ends all handshakes."""
        for task in self._handshakes:
            task.cancel()
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    async def _shake_hands(self, connection: socket.socket) -> str | None:
        with contextlib.suppress(OSError):  # a stranger, or a member that connects again
            async with asyncio.timeout(self._limits.timeout_s):
                return await admit(connection, self._key, self._mode)
        return None

    def _finish(self, connection: socket.socket, task: asyncio.Task[str | None]) -> None:
        """Hands a connection over, or closes it; a task may be cancelled before it starts."""
        del self._handshakes[task]
        claim = None if task.cancelled() else task.result()
        if claim is None:
            connection.close()
        else:
            self._on_admitted(connection, claim)

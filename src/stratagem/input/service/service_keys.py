"""Keys of the connections of the input service, from the secret of the run or of this user."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

from stratagem import environment
from stratagem.cluster.addresses import is_loopback, split_address
from stratagem.group.authentication.secret import Secret, key_of, new_secret, required_secret
from stratagem.group.transport.keys import ClusterKeys, load_zmq

_WHO = "The input service"
_FILE = "input_service.secret"


def service_keys(address: str) -> ClusterKeys:
    """Returns the keys for the service at an address, the same in all processes of a run.

    Without a secret of the run, and on loopback only, they are those of this user on this machine:
    datasets are pickled, so other users must not be able to register one. Raises ValueError without
    a secret for another host.
    """
    host = split_address(address)[0]
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:  # All networks of this machine.
            host = socket.gethostname()
    secret = required_secret(_WHO, [host])
    if secret is None and is_loopback(host):
        secret = _secret_of_user()
    z85 = load_zmq("zmq.utils.z85")
    public = load_zmq().curve_public
    pairs: list[bytes] = []
    for side in ("server", "client"):
        private = z85.encode(key_of(secret, f"input {side}"))
        pairs += [public(private), private]
    return ClusterKeys(*pairs)


def _secret_of_user() -> Secret:
    """Returns a secret in a file that only this user can read, and makes it at first use."""
    path = Path(environment.read("cache_dir")).expanduser() / _FILE
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    own = path.with_name(f"{_FILE}.{os.getpid()}")
    if not path.exists():
        descriptor = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(new_secret())
        with contextlib.suppress(FileExistsError):  # Another process was first.
            os.link(own, path)
        own.unlink()
    with open(path, encoding="utf-8") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise PermissionError(f"{path} belongs to another user, or others can read it")
        return Secret(file.read().strip(), f"The file {path}")


def tcp_address(address: str) -> str:
    """Returns `tcp://host:port`; raises ValueError for an invalid address."""
    host, port = split_address(address)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind_host(host: str) -> str:
    """Returns the address of this machine to listen on. Raises OSError for an unknown host."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return socket.gethostbyname(host)

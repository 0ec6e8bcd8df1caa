"""The keys of one cluster: whoever has them is one of its processes, and nobody else is heard.

CURVE of ZeroMQ encrypts every message between machines, and tells a server whose it is before
anything of it is read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from stratagem.messages import explain
from stratagem.optional_libraries import load

__all__ = ["ClusterKeys", "load_zmq"]

_KEY_BYTES = 40  # of CURVE's text form


def load_zmq(module: str = "zmq") -> Any:
    """Returns pyzmq, or a module of it.

    Args:
        module: its full name.

    Returns:
        The module.

    Raises:
        ImportError: it is not installed.
    """
    return load(module, needed_by="a parameter server", install="stratagem[ray]")


@dataclasses.dataclass(frozen=True, repr=False)
class ClusterKeys:
    """A pair of keys for all servers of a cluster, and one for all their clients.

    Args:
        server_public: in CURVE's text form, as all of them.
        server_secret: which only servers need.
        client_public: by which servers know clients.
        client_secret: which only clients need.

    Raises:
        ValueError: no such key.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            key = getattr(self, field.name)
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                # Not the key itself: messages are logged.
                raise ValueError(
                    explain(
                        f"{field.name} is no key.",
                        expected=f"{_KEY_BYTES} bytes in CURVE's text form.",
                        fix="make all keys at once, by ClusterKeys.make().",
                    )
                )

    def __repr__(self) -> str:
        return f"ClusterKeys(server_public={self.server_public!r})"

    @classmethod
    def make(cls) -> ClusterKeys:
        """Returns new keys.

        Returns:
            Keys that nobody else has.

        Raises:
            ImportError: pyzmq is not installed.
        """
        zmq = load_zmq()
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @classmethod
    def from_json(cls, text: str) -> ClusterKeys:
        """Returns the keys that `as_json` wrote.

        Args:
            text: what it returned.

        Returns:
            The keys.

        Raises:
            ValueError: no such text.
        """
        try:
            told: Mapping[str, str] = json.loads(text)
            return cls(**{name: key.encode("ascii") for name, key in told.items()})
        except (AttributeError, TypeError, UnicodeEncodeError, json.JSONDecodeError) as error:
            raise ValueError(
                explain(
                    "The keys of a cluster cannot be read.",
                    expected="what ClusterKeys.as_json wrote.",
                    fix="give all tasks the keys that were made for this cluster.",
                )
            ) from error

    def as_json(self) -> str:
        """Returns the keys as text, for a file or a variable that only this cluster can read."""
        fields = dataclasses.asdict(self)
        return json.dumps({name: key.decode("ascii") for name, key in fields.items()})

    def lock(self, socket: Any) -> None:
        """Makes a socket that listens encrypt, and prove that it is a server of this cluster.

        Args:
            socket: of ZeroMQ, not bound yet; its context has an `Admission` that knows
                `client_public`.
        """
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret

    def unlock(self, socket: Any) -> None:
        """Makes a socket that connects encrypt, and prove that it is a client of this cluster.

        Args:
            socket: of ZeroMQ, not connected yet.
        """
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret

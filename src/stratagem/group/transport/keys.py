"""Keys that authenticate and encrypt messages between processes of one cluster.

ZeroMQ CURVE encrypts all traffic between machines and authenticates clients before any message is
read.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stratagem.environment import load
from stratagem.errors import explain

if TYPE_CHECKING:
    import zmq


_KEY_BYTES = 40  # in CURVE text form


def load_zmq(module: str = "zmq") -> Any:
    """Returns pyzmq or one of its modules; raises ImportError if it is not installed."""
    return load(module, needed_by="a parameter server", install="stratagem[ray]")


@dataclasses.dataclass(frozen=True, repr=False)
class ClusterKeys:
    """One key pair for all servers of a cluster, and one for all clients, in CURVE text form.

    Servers do not use `client_secret`, and clients do not use `server_secret`. Raises ValueError
    for an invalid key.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            key = getattr(self, field.name)
            if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
                # Omit the key itself: messages are logged.
                raise ValueError(
                    explain(
                        f"{field.name} is not a valid key.",
                        expected=f"{_KEY_BYTES} bytes in CURVE text form.",
                        fix="create all keys together with ClusterKeys.make().",
                    )
                )

    def __repr__(self) -> str:
        return f"ClusterKeys(server_public={self.server_public!r})"

    @classmethod
    def make(cls) -> ClusterKeys:
        """Returns new random keys."""
        zmq = load_zmq()
        return cls(*zmq.curve_keypair(), *zmq.curve_keypair())

    @classmethod
    def from_json(cls, text: str) -> ClusterKeys:
        """Returns the keys that `as_json` wrote. Raises ValueError if the text is invalid."""
        try:
            pairs: Mapping[str, str] = json.loads(text)
            return cls(**{name: key.encode("ascii") for name, key in pairs.items()})
        except (AttributeError, TypeError, UnicodeEncodeError, json.JSONDecodeError) as error:
            raise ValueError(
                explain(
                    "The cluster keys cannot be parsed.",
                    expected="the output of ClusterKeys.as_json.",
                    fix="give all tasks the keys that were created for this cluster.",
                )
            ) from error

    def as_json(self) -> str:
        """Returns the keys as text. Store it where only this cluster can read it."""
        fields = dataclasses.asdict(self)
        return json.dumps({name: key.decode("ascii") for name, key in fields.items()})

    def lock(self, socket: zmq.Socket[Any]) -> None:
        """Makes a listening socket encrypt, and prove that it belongs to a server of this cluster.

        The socket must not be bound yet, and its context needs an `Admission` for `client_public`.
        """
        socket.curve_server = True
        socket.curve_secretkey = self.server_secret

    def unlock(self, socket: zmq.Socket[Any]) -> None:
        """Makes a client socket encrypt, and prove that it belongs to this cluster.

        The socket must not be connected yet.
        """
        socket.curve_serverkey = self.server_public
        socket.curve_publickey = self.client_public
        socket.curve_secretkey = self.client_secret

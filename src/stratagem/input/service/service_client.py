"""Requests to a dispatcher."""

from __future__ import annotations

from typing import Any

import numpy as np

from stratagem.closing import Closing
from stratagem.errors import InvalidArgumentError, NotFoundError, UnavailableError
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.input.service.service_keys import service_keys, tcp_address

_REFUSALS: dict[str, type[Exception]] = {
    "InvalidArgumentError": InvalidArgumentError,
    "NotFoundError": NotFoundError,
    "UnavailableError": UnavailableError,
    "ValueError": ValueError,
}


class ServiceClient(Closing):
    """A connection to a dispatcher; thread-safe. `address` is with or without `tcp://`."""

    def __init__(self, address: str) -> None:
        self.target = tcp_address(address)
        self._connections = Connections(
            service_keys(self.target), [self.target], peers="Input dispatcher"
        )

    def ask(
        self,
        kind: str,
        arrays: tuple[np.ndarray, ...] = (),
        *,
        limit_s: float | None = None,
        **fields: Any,
    ) -> Message:
        """Returns the answer to a request; raises the error if it is refused."""
        answer = self._connections.ask(0, Message(kind, fields, arrays), timeout_s=limit_s)
        if answer.kind == "refused":
            raise _REFUSALS[answer.fields["kind"]](answer.fields["text"])
        return answer

    def close(self) -> None:
        """Closes the connection; threads that wait for an answer get an UnavailableError."""
        self._connections.close()

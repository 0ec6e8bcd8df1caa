"""One parameter server: what it answers to each kind of request."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np

from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.servers.closing import Closing
from stratagem.servers.connection import ServerError
from stratagem.servers.keys import ClusterKeys
from stratagem.servers.listener import Listener, Request
from stratagem.servers.store import ShardSpec, Store
from stratagem.servers.wire import Message

__all__ = ["ParameterServer"]


class ParameterServer(Closing):
    """Holds variables of a cluster and answers its clients, from the moment it is made.

    Args:
        keys: of the cluster.
        host: the address to listen at.
        port: the port; 0 for any that is free.
        num_threads: how many requests are handled at a time.

    Raises:
        OSError: the address is taken. ImportError: pyzmq is not installed.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        num_threads: int = 2,
    ) -> None:
        self.store = Store()
        self._pickle: Any = load(
            "cloudpickle", needed_by="a parameter server", install="stratagem[ray]"
        )
        self._pushes = _Pushes()
        self._answers = {
            "create": self._create,
            "pull": self._pull,
            "pull_rows": self._pull_rows,
            "assign": self._assign,
            "scatter": self._scatter,
            "rule": self._set_rule,
            "push": self._push,
            "scalars": self._scalars,
            "set_scalar": self._set_scalar,
            "describe": self._describe,
        }
        self._listener = Listener(keys, self._handle, host=host, port=port, num_threads=num_threads)

    @property
    def address(self) -> str:
        """Where clients find it."""
        return self._listener.address

    def close(self) -> None:
        """Stops to answer."""
        self._listener.close()

    def _handle(self, request: Request) -> None:
        message = request.message
        answer = self._answers.get(message.kind)
        if answer is None:
            raise ServerError(
                explain(
                    f"A parameter server received a request of kind {message.kind!r}.",
                    expected=f"one of {sorted(self._answers)}.",
                    fix="run the same version of Stratagem everywhere.",
                )
            )
        request.answer(answer(message))

    def _create(self, message: Message) -> Message:
        """Fields: `spec`; the array is the value, or a pickled function of the rows wanted."""
        spec = ShardSpec.from_fields(message.fields["spec"])
        (array,) = message.arrays

        def make() -> np.ndarray:
            if not message.fields["is_pickled"]:
                return array
            function = self._pickle.loads(array.tobytes())
            return np.asarray(function(spec.first_row, spec.shape[0]))

        return Message("ok", {"is_new": self.store.create(spec, make)})

    def _pull(self, message: Message) -> Message:
        version = self.store.version  # before: what is newer than this may be among the values
        return Message("ok", {"version": version}, self.store.pull(message.fields["names"]))

    def _pull_rows(self, message: Message) -> Message:
        names = message.fields["names"]
        version = self.store.version
        rows = [
            self.store.pull_rows(name, numbers)
            for name, numbers in zip(names, message.arrays, strict=True)
        ]
        return Message("ok", {"version": version}, rows)

    def _assign(self, message: Message) -> Message:
        for name, value in zip(message.fields["names"], message.arrays, strict=True):
            self.store.assign(name, value, sign=message.fields["sign"])
        return Message("ok")

    def _scatter(self, message: Message) -> Message:
        rows, values = message.arrays
        self.store.scatter(message.fields["name"], rows, values, sign=message.fields["sign"])
        return Message("ok")

    def _set_rule(self, message: Message) -> Message:
        (pickled,) = message.arrays
        rule = self._pickle.loads(pickled.tobytes())
        self.store.set_rule(rule, message.fields["names"])
        return Message("ok")

    def _push(self, message: Message) -> Message:
        """Fields: `whole` and `rows`, names of variables; arrays: gradients, then ids and rows."""
        fields = message.fields
        whole, rows = fields["whole"], fields["rows"]
        arrays = list(message.arrays)
        of_rows = arrays[len(whole) :]

        def apply() -> int:
            return self.store.update(
                dict(zip(whole, arrays, strict=False)),
                dict(zip(rows, zip(of_rows[::2], of_rows[1::2], strict=True), strict=True)),
            )

        version = self._pushes.once(fields["client"], fields["number"], fields["version"], apply)
        return Message("ok", {"version": version})

    def _scalars(self, message: Message) -> Message:
        scalars = self.store.scalars
        return Message("ok", {"names": list(scalars)}, [np.asarray(s) for s in scalars.values()])

    def _set_scalar(self, message: Message) -> Message:
        self.store.set_scalar(message.fields["name"], message.arrays[0])
        return Message("ok")

    def _describe(self, message: Message) -> Message:
        return Message(
            "ok",
            {
                "version": self.store.version,
                "names": self.store.names,
                "staleness": self._pushes.staleness,
            },
        )


class _Client:
    """The last push of a client, and who applies one now."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.number = 0
        self.version = 0


class _Pushes:
    """Applies each push once, also if its answer was lost and the client asks again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[str, _Client] = {}
        self._staleness: Counter[int] = Counter()

    @property
    def staleness(self) -> list[list[int]]:
        """How many updates had been made meanwhile, and of how many pushes that is true."""
        with self._lock:
            return [[behind, count] for behind, count in sorted(self._staleness.items())]

    def once(self, client: str, number: int, pulled: int, apply: Any) -> int:
        """Applies a push, if it was not applied before.

        Args:
            client: whose it is; it has one push at a time.
            number: of the push, larger each time.
            pulled: the version that its gradients were computed from.
            apply: applies it, and returns the version then.

        Returns:
            The version after it.
        """
        with self._lock:
            known = self._clients.setdefault(client, _Client())
        with known.lock:  # who asks again waits for the first to be done
            if known.number >= number:
                return known.version
            version = apply()
            known.number, known.version = number, version
        with self._lock:
            self._staleness[version - 1 - pulled] += 1
        return version

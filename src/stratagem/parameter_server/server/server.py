"""One parameter server: what it answers to each kind of request."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.closing import Closing
from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.parameter_server.server.changes import Change, Changes
from stratagem.parameter_server.server.journal import Journal
from stratagem.parameter_server.server.journal_lock import JournalLock
from stratagem.parameter_server.server.pushes import Pushes
from stratagem.parameter_server.server.shards import ShardSpec, made_in_pieces
from stratagem.parameter_server.server.state import ServerState, next_lifetime
from stratagem.parameter_server.server.state_journal import StateJournal
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.parameter_server.transport.connection import ServerError
from stratagem.parameter_server.transport.keys import ClusterKeys
from stratagem.parameter_server.transport.listener import Listener, Request
from stratagem.parameter_server.transport.wire import Message

__all__ = ["ParameterServer"]

# Of requests with fewer bytes, the hand-over to another thread would be a large part.
_SHORT_BYTES = {"push": 2**21, "pull_rows": 2**16}


class ParameterServer(Closing):
    """Holds variables of a cluster and answers its clients, from the moment it is made.

    Args:
        keys: of the cluster.
        host: the address to listen at.
        port: the port; 0 for any that is free.
        num_threads: how many requests are handled at a time.
        journal: the file in which it finds what it held before, and writes what has changed; None
            for none.
        journal_interval_s: how long to wait after each entry of the journal. What has changed since
            the last one is lost if the process or the machine dies.

    Raises:
        OSError: the address is taken, or the journal cannot be read. DataLossError: the journal is
            damaged. UnavailableError: another process keeps it. ImportError: pyzmq is not
            installed.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        num_threads: int = 2,
        journal: str | os.PathLike[str] | None = None,
        journal_interval_s: float = 1.0,
    ) -> None:
        self.store = ServerVariables()
        self._pickle: Any = load(
            "cloudpickle", needed_by="a parameter server", install="stratagem[ray]"
        )
        self._reads = {
            "pull": self._pull,
            "pull_rows": self._pull_rows,
            "scalars": self._scalars,
            "describe": self._describe,
            "journal": self._write_journal,
        }
        self._whole_changes = {
            "create": self._create,
            "assign": self._assign,
            "scatter": self._scatter,
            "rule": self._set_rule,
            "drop_rule": self._drop_rule,
            "set_scalar": self._set_scalar,
            "expect": self._expect,
            "flush": self._flush,
        }
        with contextlib.ExitStack() as stack:
            file = None
            if journal is not None:
                stack.enter_context(JournalLock(Path(f"{os.fspath(journal)}.lock")))
                file = stack.enter_context(Journal(journal))
            self.lifetime = next_lifetime([] if file is None else file.messages)
            self._pushes = Pushes(self.store, self.lifetime)
            self._changes = Changes(self._answer)
            state = ServerState(self.store, self._pushes, self._changes, self.lifetime)
            if file is not None:
                state.restore(file.messages)
                file.messages.clear()
            self._journal = file and StateJournal(file, state, journal_interval_s)
            self._listener = Listener(
                keys,
                self._handle,
                host=host,
                port=port,
                num_threads=num_threads,
                is_short=_is_short,
            )
            if self._journal is not None:
                self._journal.start()
            self._closing = stack.pop_all()

    @property
    def address(self) -> str:
        """Address of this server."""
        return self._listener.address

    def close(self) -> None:
        """Stops to answer, and writes a last entry of the journal.

        Raises:
            OSError: the entry cannot be written.
        """
        with self._closing:
            self._listener.close()
            if self._journal is not None:
                self._journal.close()

    def _handle(self, request: Request) -> None:
        kind = request.message.kind
        if kind in self._reads:
            request.answer(self._reads[kind](request.message))
            return
        if kind != "push" and kind not in self._whole_changes:
            raise ServerError(
                explain(
                    f"A parameter server received a request of kind {kind!r}.",
                    expected=f"one of {sorted([*self._reads, *self._whole_changes, 'push'])}.",
                    fix="run the same version of Stratagem everywhere.",
                )
            )
        change = self._changes.begin(request)
        if change is None:
            return
        try:
            self._carry_out(kind, change)
        except BaseException as error:
            change.fail(error)
            raise

    def _carry_out(self, kind: str, change: Change) -> None:
        if kind == "push":  # which is answered now, or when others have come
            self._pushes.add(change)
            return
        with self.store.changing():
            change.done(**self._whole_changes[kind](change.message))

    def _answer(self, message: Message, outcome: Mapping[str, Any]) -> Message:
        """Answers a change with its result and the whole variables of field `pull`."""
        version, values = self.store.read(message.fields.get("pull", ()))
        return Message("ok", {**outcome, **self.lifetime.fields(version)}, values)

    def _create(self, message: Message) -> dict[str, Any]:
        """Fields: `specs`; the arrays are values, or pickled functions of the rows wanted."""
        is_pickled = message.fields["is_pickled"]

        def create(spec: ShardSpec, array: np.ndarray) -> bool:
            def make() -> np.ndarray:
                if not is_pickled:
                    return array
                return made_in_pieces(spec, self._pickle.loads(array.tobytes()))

            return self.store.create(spec, make, is_own=is_pickled)

        specs = map(ShardSpec.from_fields, message.fields["specs"])
        are_new = [create(spec, array) for spec, array in zip(specs, message.arrays, strict=True)]
        return {"is_new": any(are_new)}

    def _pull(self, message: Message) -> Message:
        version, values = self.store.read(message.fields["names"])
        return Message("ok", self.lifetime.fields(version), values)

    def _pull_rows(self, message: Message) -> Message:
        names = message.fields["names"]
        version = self.store.version  # before: what is newer than this may be among the rows
        rows = [
            self.store.pull_rows(name, numbers)
            for name, numbers in zip(names, message.arrays, strict=True)
        ]
        return Message("ok", self.lifetime.fields(version), rows)

    def _assign(self, message: Message) -> dict[str, Any]:
        for name, value in zip(message.fields["names"], message.arrays, strict=True):
            self.store.assign(name, value, sign=message.fields["sign"])
        return {}

    def _scatter(self, message: Message) -> dict[str, Any]:
        """Fields: `names` and `sign`; the arrays are numbers of rows and values of each name."""
        arrays = message.arrays
        for name, rows, values in zip(
            message.fields["names"], arrays[::2], arrays[1::2], strict=True
        ):
            self.store.scatter(name, rows, values, sign=message.fields["sign"])
        return {}

    def _set_rule(self, message: Message) -> dict[str, Any]:
        (pickled,) = message.arrays
        mode = UpdateMode(**message.fields["mode"])
        fields = message.fields
        self._pushes.set_rule(pickled, fields["names"], mode, fields["optimizer"])
        return {}

    def _drop_rule(self, message: Message) -> dict[str, Any]:
        self._pushes.drop_rule(message.fields["optimizer"])
        return {}

    def _expect(self, message: Message) -> dict[str, Any]:
        self._pushes.expect(message.fields["num_needed"])
        return {}

    def _flush(self, message: Message) -> dict[str, Any]:
        self._pushes.flush()
        return {}

    def _scalars(self, message: Message) -> Message:
        scalars = self.store.scalars
        return Message("ok", {"names": list(scalars)}, [np.asarray(s) for s in scalars.values()])

    def _set_scalar(self, message: Message) -> dict[str, Any]:
        self.store.set_scalar(message.fields["name"], message.arrays[0])
        return {}

    def _describe(self, message: Message) -> Message:
        journal = self._journal
        return Message(
            "ok",
            {
                **self.lifetime.fields(self.store.version),
                "names": self.store.names,
                "staleness": self._pushes.staleness,
                "num_waiting": self._pushes.num_waiting,
                "waiting": self._pushes.waiting,
                "num_discarded": self._pushes.num_discarded,
                "journaled_version": None if journal is None else journal.journaled_version,
                "journal_error": None if journal is None else journal.error,
            },
        )

    def _write_journal(self, message: Message) -> Message:
        if self._journal is None:
            raise ServerError(
                explain(
                    "A parameter server without a journal was to write an entry.",
                    expected="a server that has a journal.",
                    fix="start it with journal=, the path of a file.",
                )
            )
        return Message("ok", {"journaled_version": self._journal.write()})


def _is_short(message: Message) -> bool:
    limit_bytes = _SHORT_BYTES.get(message.kind, 0)
    return sum(array.nbytes for array in message.arrays) < limit_bytes

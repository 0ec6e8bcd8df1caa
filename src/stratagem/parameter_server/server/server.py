"""Parameter server process: dispatch of requests to variables, updates and the journal."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.closing import Closing
from stratagem.group.transport.connection import ServerError
from stratagem.group.transport.journal import Journal, invalid_journal
from stratagem.group.transport.journal_folders import remove_journal
from stratagem.group.transport.journal_lock import JournalLock
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.local_sockets import sweep_local_sockets
from stratagem.group.transport.wire import Message
from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.parameter_server.server.changes import Change, Changes
from stratagem.parameter_server.server.pushes import Pushes
from stratagem.parameter_server.server.shards import ShardSpec, made_in_pieces
from stratagem.parameter_server.server.state import INVALID_STATE, ServerState, next_lifetime
from stratagem.parameter_server.server.state_journal import StateJournal
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.table_moves import TableMoves
from stratagem.parameter_server.server.table_requests import TableRequests
from stratagem.parameter_server.server.updates import UpdateMode

# Below these sizes, handing a request to another thread costs more than handling it inline, unless
# rows are read from disk.
_SHORT_BYTES = {"push": 2**21, "sum": 2**21, "pull_rows": 2**16}


class ParameterServer(Closing):
    """Stores variables of a cluster, and serves clients from construction until `close`.

    Args:
        keys: keys of the cluster.
        host: address to listen on.
        port: port to listen on; 0 picks a free one.
        num_threads: number of requests handled concurrently.
        journal: file from which state is restored and to which changes are written; None for none.
        journal_interval_s: pause between journal entries, in seconds. Changes since the last entry
            are lost if the process or machine dies.
        is_durable: answer each change only once it is in the journal, on disk: then no answered
            change is lost.
        removes_journal: remove the journal in `close`, if no later run uses it.

    Raises:
        OSError: the address is taken, or the journal cannot be read.
        DataLossError: the journal is damaged.
        UnavailableError: another process uses the journal.
        ImportError: pyzmq is not installed.
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
        is_durable: bool = False,
        removes_journal: bool = False,
    ) -> None:
        self._removed = Path(journal) if journal is not None and removes_journal else None
        self.store = ServerVariables()
        self._tables, self._moves = TableRequests(self.store), TableMoves(self.store)
        self._pickle: Any = load(
            "cloudpickle", needed_by="a parameter server", install="stratagem[ray]"
        )
        sweep_local_sockets()  # also if the journal is then refused
        self._reads, self._whole_changes = self._read_handlers(), self._change_handlers()
        with contextlib.ExitStack() as stack:
            stack.callback(self.store.tiers.close)
            file = None if journal is None else stack.enter_context(_locked(journal))
            self._changes = Changes(self._answer)
            try:
                self.lifetime = next_lifetime([] if file is None else file.messages)
                self._pushes = Pushes(self.store, self.lifetime)
                state = ServerState(self.store, self._pushes, self._changes, self.lifetime)
                if file is not None:
                    state.restore(file.messages)
                    file.messages.clear()
            except INVALID_STATE as error:
                raise invalid_journal(Path(journal or ""), error) from error
            self._num_dropped = 0 if file is None else file.num_dropped
            self._journal = file and StateJournal(
                file, state, journal_interval_s, is_durable=is_durable
            )
            self._listener = Listener(
                keys,
                self._handle,
                host=host,
                port=port,
                num_threads=num_threads,
                is_short=self._is_short,
            )
            if self._journal is not None:
                self._journal.start()
            self._closing = stack.pop_all()

    @property
    def address(self) -> str:
        """Address of this server."""
        return self._listener.address

    def close(self) -> None:
        """Stops serving and writes a last journal entry, which may raise OSError."""
        with self._closing:
            self._listener.close()
            if self._journal is not None:
                self._journal.close()
        if self._journal is None or self._removed is not None:
            self.store.tiers.close(removes=True)
        if self._removed is not None:
            remove_journal(self._removed)

    def _read_handlers(self) -> dict[str, Callable[[Message], Message]]:
        return {
            "pull": self._pull,
            "pull_rows": self._pull_rows,
            "scalars": self._scalars,
            "describe": self._describe,
            "journal": self._write_journal,
            "check_tables": self._tables.check,
            "export_rows": self._tables.export_rows,
            "copy_rows": self._moves.copy,
        }

    def _change_handlers(self) -> dict[str, Callable[[Message], dict[str, Any]]]:
        """Returns the handlers of changes other than pushes."""
        return {
            "create": self._create,
            "assign": self._assign,
            "scatter": self._scatter,
            "rule": self._set_rule,
            "drop_rule": self._drop_rule,
            "set_scalar": self._set_scalar,
            "expect": self._expect,
            "flush": self._flush,
            "load_tables": self._tables.load,
            "evict": self._tables.evict,
            "begin_move": self._moves.begin,
            "put_rows": self._moves.put,
            "end_move": self._moves.end,
            "place_tables": self._moves.place,
            "drop_tables": self._moves.drop,
        }

    def _handle(self, request: Request) -> None:
        kind = request.message.kind
        if kind in self._reads:
            request.answer(self._reads[kind](request.message))
            return
        if kind == "save_tables":
            self._tables.save(request)
            return
        if kind == "sum":  # answered once all workers have asked
            self._pushes.add_summand(
                request.message,
                lambda total: request.answer(
                    Message("ok", self._fields(self.store.version), [total])
                ),
            )
            return
        known = {*self._reads, *self._whole_changes, "push", "save_tables", "sum"}
        if kind not in known:
            raise ServerError(
                explain(
                    f"A parameter server received a request of kind {kind!r}.",
                    expected=f"one of {sorted(known)}.",
                    fix="run the same Stratagem version in all processes.",
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
        if kind == "push":  # answered now, or after the synchronous update
            missing = self._pushes.missing_rules(change.message)
            if missing:
                fields = {"optimizers": missing, **self._fields(self.store.version)}
                change.answer_undone(Message("needs_rule", fields))
                return
            self._pushes.add(change)
            return
        with self.store.changing():
            if not change.answer_repeated():
                change.done(**self._whole_changes[kind](change.message))

    def _answer(self, message: Message, outcome: Mapping[str, Any]) -> Message:
        """Builds the answer of a change, with the whole variables in field `pull`."""
        version, values = self.store.read(message.fields.get("pull", ()))
        return Message("ok", {**outcome, **self._fields(version)}, values)

    def _fields(self, version: int) -> dict[str, Any]:
        return self.lifetime.fields(version, self._changes.counts.numbers())

    def _create(self, message: Message) -> dict[str, Any]:
        """Fields: `specs`, `is_pickled`. Arrays: values, or pickled functions that create rows.

        Keyed tables have neither.
        """
        is_pickled = message.fields["is_pickled"]

        def create(spec: ShardSpec, array: np.ndarray) -> bool:
            def make() -> np.ndarray:
                if not is_pickled:
                    return array
                return made_in_pieces(spec, self._pickle.loads(array.tobytes()))

            return self.store.create(spec, make, is_own=is_pickled)

        specs = [ShardSpec.from_fields(fields) for fields in message.fields["specs"]]
        keyed = [spec for spec in specs if spec.table is not None]
        others = [spec for spec in specs if spec.table is None]
        pairs = zip(others, message.arrays, strict=True)
        are_new = [self.store.create(spec) for spec in keyed]
        are_new += [create(spec, array) for spec, array in pairs]
        return {"is_new": any(are_new)}

    def _pull(self, message: Message) -> Message:
        version, values = self.store.read(message.fields["names"])
        return Message("ok", self._fields(version), values)

    def _pull_rows(self, message: Message) -> Message:
        names = message.fields["names"]
        version = self.store.version  # read first: some rows may be newer
        rows = [
            self.store.pull_rows(name, numbers, are_expanded=False)
            for name, numbers in zip(names, message.arrays, strict=True)
        ]
        return Message("ok", self._fields(version), rows)

    def _assign(self, message: Message) -> dict[str, Any]:
        for name, value in zip(message.fields["names"], message.arrays, strict=True):
            self.store.assign(name, value, sign=message.fields["sign"])
        return {}

    def _scatter(self, message: Message) -> dict[str, Any]:
        """Fields: `names`, `sign`. Arrays: row numbers and values for each name."""
        arrays = message.arrays
        for name, rows, values in zip(
            message.fields["names"], arrays[::2], arrays[1::2], strict=True
        ):
            self.store.scatter(name, rows, values, sign=message.fields["sign"])
        return {}

    def _set_rule(self, message: Message) -> dict[str, Any]:
        (pickled,) = message.arrays
        fields = message.fields
        mode = None if fields["mode"] is None else UpdateMode(**fields["mode"])
        self._pushes.set_rule(pickled, fields["names"], mode, fields["optimizer"])
        return {}

    def _drop_rule(self, message: Message) -> dict[str, Any]:
        self.store.drop_rule(message.fields["optimizer"])
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
        self.store.set_scalars({message.fields["name"]: message.arrays[0]})
        return {}

    def _describe(self, message: Message) -> Message:
        journal = self._journal
        return Message(
            "ok",
            {
                "restored_version": None,
                **self._fields(self.store.version),
                "updates": self._changes.counts.described(),
                "names": self.store.names,
                "tables": self.store.tables,
                "layouts": self.store.layouts,
                "staleness": self._pushes.staleness,
                "num_waiting": self._pushes.num_waiting,
                "waiting": self._pushes.waiting,
                "num_discarded": self._pushes.num_discarded,
                "journaled_version": None if journal is None else journal.journaled_version,
                "journal_error": None if journal is None else journal.error,
                "num_dropped_records": self._num_dropped,
            },
        )

    def _write_journal(self, message: Message) -> Message:
        """Field: `is_needed`; False if a server may have no journal."""
        if self._journal is None and not message.fields.get("is_needed", True):
            return Message("ok", {"journaled_version": None})
        if self._journal is None:
            raise ServerError(
                explain(
                    "A parameter server without a journal cannot write a journal entry.",
                    expected="a server that was started with a journal.",
                    fix="start the servers with journal_dir=.",
                )
            )
        return Message("ok", {"journaled_version": self._journal.write()})

    def _is_short(self, message: Message) -> bool:
        limit_bytes = 0 if self.store.tiers.has_tables else _SHORT_BYTES.get(message.kind, 0)
        return sum(array.nbytes for array in message.arrays) < limit_bytes


@contextlib.contextmanager
def _locked(path: str | os.PathLike[str]) -> Generator[Journal]:
    with JournalLock(Path(f"{os.fspath(path)}.lock")), Journal(path) as journal:
        yield journal

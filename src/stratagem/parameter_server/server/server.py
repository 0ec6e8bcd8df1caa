"""Parameter server process: dispatch of requests to variables, updates and the journal."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.environment import load
from stratagem.group.transport.connection import ServerError
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.journal import Journal, JournalLock, invalid_journal, remove_journal
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.changes import Change, Changes, Lifetime
from stratagem.parameter_server.server.pushes import Pushes
from stratagem.parameter_server.server.shards import (
    SavedPart,
    ShardSpec,
    UpdateMode,
    made_in_pieces,
)
from stratagem.parameter_server.server.store import Marks, ServerVariables
from stratagem.parameter_server.server.table_requests import TableRequests
from stratagem.parameter_server.server.tables.disk_rows import Position
from stratagem.parameter_server.server.tables.key_slots import SavedKeys
from stratagem.parameter_server.server.tables.keyed_shard import SavedTable
from stratagem.resources import Closing

# Server state as journal messages: JSON and arrays, without code.
#
# An entry holds all changes since the previous entry. A rewritten journal begins with the rows of
# all tables, in pieces; the entry that follows has the rows that changed while those were written.


# Errors of `next_lifetime` and `ServerState.restore` for messages that no server wrote.
INVALID_STATE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    StopIteration,
    TypeError,
    ValueError,
)

_ENTRY = "entry"
_PIECE = "piece"


def next_lifetime(messages: Sequence[Message]) -> Lifetime:
    """Returns the lifetime of a server that starts from these journal messages."""
    now, fields = time.time_ns(), _last_entry(messages)
    if fields is None:
        return Lifetime(now)
    number = max(now, fields["lifetime"] + 1)
    return Lifetime(number, fields["version"], tuple(fields["updates"]["applied"]))


def _last_entry(messages: Sequence[Message]) -> dict[str, Any] | None:
    entries = (message.fields for message in reversed(messages) if message.kind == _ENTRY)
    return next(entries, None)


@dataclasses.dataclass(frozen=True)
class ServerState:
    """State of a server: variables, optimizers, and answered changes."""

    store: ServerVariables
    pushes: Pushes
    changes: Changes
    lifetime: Lifetime

    @property
    def num_changes(self) -> int:
        """Counter that grows with every change."""
        return self.store.num_changes + self.changes.num_done

    @property
    def position(self) -> Position:
        """Position of a journal entry made now: larger than those of all earlier entries."""
        return self.lifetime.number, self.num_changes

    def entry(self, parts: list[SavedPart]) -> Message:
        """Returns a journal entry with changed `parts`. Call within `ServerVariables.changing`."""
        described, arrays = _packed(parts)
        _, num_changes = self.position
        scalars = self.store.scalars
        fields = {
            "version": self.store.version,
            "lifetime": self.lifetime.number,
            "num_changes": num_changes,
            "updates": self.changes.counts.saved(),
            "changes": self.changes.saved(),
            "mode": dataclasses.asdict(self.pushes.mode),
            "optimizers": self.store.optimizers,
            "scalars": list(scalars),
            "parts": described,
        }
        return Message(_ENTRY, fields, [*arrays, *scalars.values()])

    def pieces(self, marks: Marks | None = None) -> Iterator[Message]:
        """Yields table rows, all or the marked ones, while updates continue."""
        for part in self.store.pieces(marks):
            described, arrays = _packed([part])
            yield Message(_PIECE, {"parts": described}, arrays)

    def restore(self, messages: Sequence[Message]) -> None:
        """Restores the state from a journal, before the server accepts requests."""
        if (entry := _last_entry(messages)) is not None:
            self.store.tiers.position = entry["lifetime"], entry.get("num_changes", 0)
        last = _last_disk_ids(messages)
        for message in messages:
            arrays = iter(message.arrays)
            for described in message.fields["parts"]:
                part = _unpacked(described, arrays)
                if _disk_id(described) == last.get(part.spec.name):
                    self.store.restore(part)
            if message.kind == _ENTRY:
                self._restore_entry(message.fields, arrays)
        self.store.restored()

    def _restore_entry(self, fields: dict[str, Any], arrays: Iterator[np.ndarray]) -> None:
        scalars = dict(zip(fields["scalars"], arrays, strict=True))
        self.store.restore_optimizers(fields["version"], fields["optimizers"], scalars)
        self.pushes.set_mode(UpdateMode(**fields["mode"]))
        self.changes.counts.restore(fields["updates"])
        self.changes.restore(fields["changes"])


def _disk_id(described: dict[str, Any]) -> str | None:
    return described.get("table", {}).get("disk", {}).get("id")


def _last_disk_ids(messages: Sequence[Message]) -> dict[str, str | None]:
    """Returns the last files of each table with tiers: loaded rows replace those before."""
    parts = [described for message in messages for described in message.fields["parts"]]
    return {described["spec"]["name"]: _disk_id(described) for described in parts}


def _packed(parts: Iterable[SavedPart]) -> tuple[list[dict[str, Any]], list[Any]]:
    described: list[dict[str, Any]] = []
    arrays: list[Any] = []
    for part in parts:
        spec = dataclasses.asdict(part.spec)
        table: SavedTable | None = part.table
        own: dict[str, Any] = {"spec": spec, "slots": list(part.slots)}
        if table is None:
            own["is_whole"] = part.rows is None
            arrays += [] if part.rows is None else [part.rows]
        else:
            own["table"] = {"counters": table.counters, "initials": table.initials}
            own["table"] |= {} if table.disk is None else {"disk": table.disk}
            arrays += [*table.rows.arrays, *table.candidates.arrays]
        described.append(own)
        arrays += [part.value, *part.slots.values()]
    return described, arrays


def _unpacked(described: dict[str, Any], arrays: Iterator[np.ndarray]) -> SavedPart:
    spec = ShardSpec.from_fields(described["spec"])
    table = None
    if spec.table is None:
        rows = None if described["is_whole"] else next(arrays)
    else:
        saved, candidates = SavedKeys.from_arrays(arrays), SavedKeys.from_arrays(arrays)
        table, rows = SavedTable(saved, candidates, **described["table"]), saved.slots
    value = next(arrays)
    slots = {slot: next(arrays) for slot in described["slots"]}
    return SavedPart(spec, rows, value, slots, table)


# Background writes of server state to its journal; updates do not wait for the disk.

# A journal is rewritten when it is this many times as large as the state,
_MOST_TIMES = 2
# plus an allowance for counters and names,
_SLACK_BYTES = 2**20
# and has grown so much since it was rewritten: row numbers may be larger than a row,
_MOST_GROWTH = 1.5
# or when an entry would copy more than this size and more than 1/8 of the state.
_MOST_COPIED_BYTES = 2**26
_COPIED_PART = 8
# Rounds of writing rows that changed meanwhile, before the rest is copied at once.
_MOST_ROUNDS = 5


class StateJournal(Closing):
    """Thread that writes changes to a journal, pausing `interval_s` seconds after each entry.

    `journaled_version` is the version in the last entry; None before the first one. `error`
    describes the failure of the last write; None if it succeeded. Closes `journal` when closed.

    With `is_durable`, changes are answered only once they are on disk, and each change makes the
    thread write at once. Changes that arrive during a write share the next entry.
    """

    def __init__(
        self, journal: Journal, state: ServerState, interval_s: float, *, is_durable: bool = False
    ) -> None:
        self._journal = journal
        self._state = state
        self._interval_s = interval_s
        self._writing = threading.Lock()
        self._num_written = state.num_changes
        self._position = state.store.tiers.position
        state.store.tiers.save = self.write
        self._rewritten_bytes = 0
        self._is_over = threading.Event()
        self._is_due = threading.Event()
        self._held: deque[tuple[Sequence[Request], Message]] = deque()
        if is_durable:
            state.changes.hold = self._hold
        self.journaled_version = state.lifetime.restored_version
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def write(self) -> int:
        """Writes all changes, and returns the version on disk.

        If this raises OSError, the next entry includes these changes.
        """
        with self._writing:
            held: list[tuple[Sequence[Request], Message]] = []
            try:
                self._write(held)
            except Exception as error:
                self.error = f"{type(error).__name__}: {error}"
                for requests, _ in held:
                    for request in requests:
                        request.fail(error)
                raise
            self.error = None
            for requests, answer in held:
                for request in requests:
                    request.answer(answer)
            self._flush()
            return self.journaled_version or 0

    def close(self) -> None:
        """Stops the thread and writes the last changes, which may raise OSError."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._is_due.set()
        self._thread.join()
        try:
            self.write()
        finally:
            self._journal.close()

    def _run(self) -> None:
        while True:
            self._is_due.wait(self._interval_s)
            if self._is_over.is_set():
                return
            self._is_due.clear()  # before writing: a later change sets it again
            with contextlib.suppress(Exception):  # reported in `error`
                self.write()

    def _hold(self, requests: Sequence[Request], answer: Message) -> None:
        """Holds an answer until the next entry is on disk."""
        self._held.append((requests, answer))
        self._is_due.set()

    def _take_held(self, held: list[tuple[Sequence[Request], Message]]) -> None:
        """Moves the held answers to `held`. Call within `changing`, before copying the state."""
        held += [self._held.popleft() for _ in range(len(self._held))]

    def _flush(self) -> None:
        """Writes rows of tables with tiers to disk."""
        try:
            self._state.store.tiers.flush(self._position)
        except OSError as error:
            self.error = f"{type(error).__name__}: {error}"
            raise

    def _write(self, held: list[tuple[Sequence[Request], Message]]) -> None:
        state, store = self._state, self._state.store
        with self._put_back_on_error() as taken:
            with store.changing():
                self._take_held(held)
                num_changes, version, position = state.num_changes, store.version, state.position
                if num_changes == self._num_written and self.journaled_version is not None:
                    return
                entry = None
                # Within `changing`: creating a table holds it until all rows are marked.
                if not self._begins_anew():
                    taken.append(store.take_marks())
                    entry = state.entry(store.saved(taken[0]))
            if entry is not None:
                self._journal.append(entry)
                self._num_written, self.journaled_version = num_changes, version
                self._position = position
                return
        self._write_anew(held)

    def _begins_anew(self) -> bool:
        most_bytes = max(
            _MOST_TIMES * self._state.store.size_bytes + _SLACK_BYTES,
            _MOST_GROWTH * self._rewritten_bytes,
        )
        return self._journal.size_bytes > most_bytes or self._is_much_marked()

    def _is_much_marked(self) -> bool:
        """Returns True if the changes are too large to copy at once."""
        store = self._state.store
        return store.marked_bytes > max(_MOST_COPIED_BYTES, store.size_bytes // _COPIED_PART)

    def _write_anew(self, held: list[tuple[Sequence[Request], Message]]) -> None:
        """Rewrites the journal. Copies tables in pieces: memory may not hold two copies."""
        state, store = self._state, self._state.store
        num_changes, version, position = 0, 0, self._position

        def messages() -> Iterator[Message]:
            nonlocal num_changes, version, position
            with store.changing():
                taken.append(store.take_marks())
            yield from state.pieces()
            for _ in range(_MOST_ROUNDS):  # many rows changed, or got new slots
                with store.changing():
                    if not self._is_much_marked():
                        break
                    taken.append(store.take_marks())
                yield from state.pieces(taken[-1])
            with store.changing():
                self._take_held(held)
                num_changes, version, position = state.num_changes, store.version, state.position
                taken.append(store.take_marks())
                entry = state.entry(store.saved(taken[-1], is_all=True))
            yield entry

        with self._put_back_on_error() as taken:
            self._journal.replace(messages())
        self._rewritten_bytes = self._journal.size_bytes
        self._num_written, self.journaled_version = num_changes, version
        self._position = position

    @contextlib.contextmanager
    def _put_back_on_error(self) -> Generator[list[Marks]]:
        taken: list[Marks] = []
        try:
            yield taken
        except BaseException:
            for marks in taken:
                self._state.store.put_back(marks)
            raise


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
        self._tables = TableRequests(self.store)
        self._pickle: Any = load(
            "cloudpickle", needed_by="a parameter server", install="stratagem[ray]"
        )
        self._reads: dict[str, Callable[[Message], Message]] = {
            "pull": self._pull,
            "pull_rows": self._pull_rows,
            "scalars": self._scalars,
            "describe": self._describe,
            "journal": self._write_journal,
            "check_tables": self._tables.check,
            "export_rows": self._tables.export_rows,
        }
        # Changes other than pushes, which may return an outcome.
        self._whole_changes: dict[str, Callable[[Message], dict[str, Any] | None]] = {
            "create": self._create,
            "assign": self._assign,
            "scatter": self._scatter,
            "rule": self._set_rule,
            "drop_rule": lambda message: self.store.drop_rule(message.fields["optimizer"]),
            "set_scalar": lambda message: self.store.set_scalars(
                {message.fields["name"]: message.arrays[0]}
            ),
            "expect": lambda message: self._pushes.expect(message.fields["num_needed"]),
            "flush": lambda message: self._pushes.flush(),
            "load_tables": self._tables.load,
        }
        with contextlib.ExitStack() as stack:
            stack.callback(self.store.tiers.close)
            file: Journal | None = None
            if journal is not None:
                stack.enter_context(JournalLock(Path(f"{os.fspath(journal)}.lock")))
                file = stack.enter_context(Journal(journal))
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
                is_inline=lambda message, is_idle: is_idle and self._is_short(message),
            )
            if self._journal is not None:
                self._journal.start()
            self._closing = stack.pop_all()

    @property
    def address(self) -> str:
        """Address of this server."""
        return self._listener.addresses

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
        if kind != "push" and kind not in self._whole_changes:
            raise ServerError(f"a parameter server knows no request of kind {kind!r}")
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
                change.done(**(self._whole_changes[kind](change.message) or {}))

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

    def _assign(self, message: Message) -> None:
        for name, value in zip(message.fields["names"], message.arrays, strict=True):
            self.store.assign(name, value, sign=message.fields["sign"])

    def _scatter(self, message: Message) -> None:
        """Fields: `names`, `sign`. Arrays: row numbers and values for each name."""
        arrays = message.arrays
        for name, rows, values in zip(
            message.fields["names"], arrays[::2], arrays[1::2], strict=True
        ):
            self.store.scatter(name, rows, values, sign=message.fields["sign"])

    def _set_rule(self, message: Message) -> None:
        (pickled,) = message.arrays
        fields = message.fields
        mode = None if fields["mode"] is None else UpdateMode(**fields["mode"])
        rule = self._pickle.loads(pickled.tobytes())
        self._pushes.set_rule(rule, fields["names"], mode, fields["optimizer"])

    def _scalars(self, message: Message) -> Message:
        scalars = self.store.scalars
        return Message("ok", {"names": list(scalars)}, [np.asarray(s) for s in scalars.values()])

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
                "staleness": self._pushes.staleness,
                "waiting": self._pushes.waiting,
                "num_discarded": self._pushes.num_discarded,
                "journaled_version": None if journal is None else journal.journaled_version,
                "journal_error": None if journal is None else journal.error,
                "num_dropped_records": self._num_dropped,
            },
        )

    def _write_journal(self, message: Message) -> Message:
        version = None if self._journal is None else self._journal.write()
        return Message("ok", {"journaled_version": version})

    def _is_short(self, message: Message) -> bool:
        limit_bytes = 0 if self.store.tiers.has_tables else _SHORT_BYTES.get(message.kind, 0)
        if sum(array.nbytes for array in message.arrays) >= limit_bytes:
            return False
        # While a program is compiled, 0.3 s each, pings must be answered: 26 tables of different
        # shapes took 5 to 9 s, and clients gave the server up.
        return message.kind != "push" or self._pushes.is_quick(message)

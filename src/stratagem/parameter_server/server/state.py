"""Server state as journal messages: JSON and arrays, without code.

An entry holds all changes since the previous entry. A rewritten journal begins with the rows of all
tables, in pieces; the entry that follows has the rows that changed while those were written.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.changes import Changes, Lifetime
from stratagem.parameter_server.server.pushes import Pushes
from stratagem.parameter_server.server.shards import SavedPart, ShardSpec
from stratagem.parameter_server.server.store import Marks, ServerVariables
from stratagem.parameter_server.server.tables.disk_rows import Position
from stratagem.parameter_server.server.tables.key_slots import SavedKeys
from stratagem.parameter_server.server.tables.keyed_shard import SavedTable
from stratagem.parameter_server.server.updates import UpdateMode

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
    now = time.time_ns()
    for message in reversed(messages):
        if message.kind == _ENTRY:
            fields = message.fields
            number = max(now, fields["lifetime"] + 1)
            return Lifetime(number, fields["version"], tuple(fields["updates"]["applied"]))
    return Lifetime(now)


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
        self.store.tiers.position = _last_position(messages)
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


def _last_position(messages: Sequence[Message]) -> Position:
    for message in reversed(messages):
        if message.kind == _ENTRY:
            return message.fields["lifetime"], message.fields.get("num_changes", 0)
    return 0, 0


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

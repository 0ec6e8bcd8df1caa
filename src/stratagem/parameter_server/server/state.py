"""All that a server must have again when it is started again, as messages of a journal.

A journal holds entries, each of what has changed since the one before. One that was written anew
begins with the rows of all tables, in pieces: whatever changed while they were written is in the
entry after them.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from stratagem.parameter_server.server.changes import Changes
from stratagem.parameter_server.server.pushes import Pushes
from stratagem.parameter_server.server.shards import SavedPart, ShardSpec
from stratagem.parameter_server.server.store import Marks, ServerVariables
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.parameter_server.server.versions import Lifetime
from stratagem.parameter_server.transport.wire import Message

__all__ = ["ServerState", "next_lifetime"]

_ENTRY = "entry"
_PIECE = "piece"


def next_lifetime(messages: Sequence[Message]) -> Lifetime:
    """Returns the run of a server that begins now.

    Args:
        messages: of its journal.
    """
    now = time.time_ns()
    for message in reversed(messages):
        if message.kind == _ENTRY:
            fields = message.fields
            return Lifetime(max(now, fields["lifetime"] + 1), fields["version"])
    return Lifetime(now)


@dataclasses.dataclass(frozen=True)
class ServerState:
    """State of a server: variables, optimizers, and answered changes.

    Args:
        store: its variables.
        pushes: the rule.
        changes: what the requests of its clients have come to.
        lifetime: which time it runs.
    """

    store: ServerVariables
    pushes: Pushes
    changes: Changes
    lifetime: Lifetime

    @property
    def num_changes(self) -> int:
        """Grows with whatever changes."""
        return self.store.num_changes + self.changes.num_done

    def entry(self, parts: list[SavedPart]) -> Message:
        """Returns an entry. Nothing may change meanwhile.

        Args:
            parts: what has changed of the variables.
        """
        described, arrays = _packed(parts)
        scalars, rules = self.store.scalars, self.pushes.pickled_rules
        fields = {
            "version": self.store.version,
            "lifetime": self.lifetime.number,
            "clients": self.changes.done(),
            "mode": dataclasses.asdict(self.pushes.mode),
            "optimizers": list(rules),
            "scalars": list(scalars),
            "parts": described,
        }
        return Message(_ENTRY, fields, [*arrays, *rules.values(), *scalars.values()])

    def pieces(self, marks: Marks | None = None) -> Iterator[Message]:
        """Returns rows of tables, while they change.

        Args:
            marks: which rows; None for all.
        """
        for part in self.store.pieces(marks):
            described, arrays = _packed([part])
            yield Message(_PIECE, {"parts": described}, arrays)

    def restore(self, messages: Sequence[Message]) -> None:
        """Takes what a journal has, before anybody asks.

        Args:
            messages: of the journal.
        """
        for message in messages:
            arrays = iter(message.arrays)
            for described in message.fields["parts"]:
                self.store.restore(_unpacked(described, arrays))
            if message.kind == _ENTRY:
                self._restore_entry(message.fields, arrays)

    def _restore_entry(self, fields: dict[str, Any], arrays: Iterator[np.ndarray]) -> None:
        for gone in [*self.pushes.pickled_rules.keys() - set(fields["optimizers"])]:
            self.pushes.drop_rule(gone)
        for optimizer in fields["optimizers"]:
            self.pushes.set_rule(next(arrays), [], UpdateMode(**fields["mode"]), optimizer)
        scalars = dict(zip(fields["scalars"], arrays, strict=True))
        self.store.restore_counts(fields["version"], scalars)
        self.changes.restore(fields["clients"])


def _packed(parts: Iterable[SavedPart]) -> tuple[list[dict[str, Any]], list[Any]]:
    described: list[dict[str, Any]] = []
    arrays: list[Any] = []
    for part in parts:
        spec = dataclasses.asdict(part.spec)
        described.append({"spec": spec, "slots": list(part.slots), "is_whole": part.rows is None})
        arrays += [] if part.rows is None else [part.rows]
        arrays += [part.value, *part.slots.values()]
    return described, arrays


def _unpacked(described: dict[str, Any], arrays: Iterator[np.ndarray]) -> SavedPart:
    spec = ShardSpec.from_fields(described["spec"])
    rows = None if described["is_whole"] else next(arrays)
    value = next(arrays)
    return SavedPart(spec, rows, value, {slot: next(arrays) for slot in described["slots"]})

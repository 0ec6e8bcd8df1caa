"""Pushed gradients on a server: applied, accumulated for a synchronous update, or discarded."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from stratagem.group.transport.wire import Message
from stratagem.messages import explain
from stratagem.optional_libraries import load
from stratagem.parameter_server.server.changes import Change
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.synchronous import (
    Contribution,
    SynchronousSums,
    SynchronousUpdates,
)
from stratagem.parameter_server.server.updates import ASYNCHRONOUS, UpdateMode
from stratagem.parameter_server.server.versions import Lifetime


class Pushes:
    """Applies pushed gradients with the client's optimizers and update mode."""

    def __init__(self, store: ServerVariables, lifetime: Lifetime) -> None:
        self._store = store
        self._lifetime = lifetime
        self._pickle: Any = load(
            "cloudpickle", needed_by="a parameter server", install="stratagem[ray]"
        )
        self._synchronous: SynchronousUpdates | None = None
        self._sums = SynchronousSums(store)
        self._counting = threading.Lock()
        self._staleness: Counter[int] = Counter()
        self.num_discarded = 0
        self.mode = ASYNCHRONOUS

    @property
    def staleness(self) -> list[list[int]]:
        """Staleness histogram: [number of updates behind, number of pushes] pairs."""
        with self._counting:
            return [[behind, count] for behind, count in sorted(self._staleness.items())]

    @property
    def num_waiting(self) -> int:
        """Number of workers waiting for a synchronous update."""
        return len(self.waiting)

    @property
    def waiting(self) -> list[str]:
        """Names of the workers waiting for a synchronous update."""
        for_update = [] if self._synchronous is None else self._synchronous.waiting
        return sorted({*for_update, *self._sums.waiting})

    def set_rule(
        self,
        pickled: np.ndarray,
        names: list[str],
        mode: UpdateMode | None = None,
        optimizer: str = "",
    ) -> None:
        """Sets an optimizer and the update mode; None keeps the mode.

        `pickled` must come from an authenticated client.

        Raises:
            KeyError: no such variable.
            ValueError: the name belongs to a different optimizer.
        """
        with self._store.changing():
            self._store.set_rule(self._pickle.loads(pickled.tobytes()), names, optimizer)
            if mode is not None:
                self.set_mode(mode)

    def set_mode(self, mode: UpdateMode) -> None:
        """Sets the update mode.

        Applies pending synchronous gradients first if the mode becomes asynchronous.
        """
        with self._store.changing():
            if self._synchronous is None and mode.num_needed:
                self._synchronous = SynchronousUpdates(
                    self._store, mode.num_needed, averages=mode.rounds is not None
                )
            elif self._synchronous is not None and mode.num_needed:
                self._synchronous.expect(mode.num_needed)
            else:
                self.flush()
                self._synchronous = None
            self.mode = mode
            self._sums.expect(mode.num_needed)

    def missing_rules(self, message: Message) -> list[str]:
        """Returns the optimizers of a push that a client must send again after a restart."""
        fields = message.fields
        own = fields.get("optimizers", {})
        return self._store.missing_rules(
            own.get(name, "") for name in [*fields["whole"], *fields["rows"]]
        )

    def add(self, change: Change) -> None:
        """Applies or discards a push, answering now or after the synchronous update.

        Fields: `whole` and `rows`, names of variables; `optimizers`, by variable name; `scalars`,
        which are set first, like the variables and slots in `assigned`, with their signs; `worker`;
        and the `version` and `lifetime` of the values used. Arrays: the gradients of `whole`, then
        row numbers or keys, and row gradients, for each of `rows`, then the values of `assigned`.
        The answer to an update that dropped row gradients, because their keys have no row, has
        their number in `refused`.

        Raises:
            KeyError: no such variable.
            RuntimeError: no rule is set.
            IndexError: no such row.
        """
        fields, arrays = change.message.fields, list(change.message.arrays)
        begin = len(fields["whole"])
        end = begin + 2 * len(fields["rows"])
        pairs = zip(arrays[begin:end:2], arrays[begin + 1 : end : 2], strict=True)
        signs: dict[str, int] = fields.get("assigned", {})
        pairs_of_assigned = zip(signs.items(), arrays[end:], strict=True)
        assigned = {name: (value, sign) for (name, sign), value in pairs_of_assigned}
        whole = dict(zip(fields["whole"], arrays, strict=False))
        rows = dict(zip(fields["rows"], pairs, strict=True))
        optimizers = fields.get("optimizers", {})
        self._store.tiers.warm(rows)
        with self._store.changing():
            if change.answer_repeated():
                return
            pulled = self._lifetime.version_of(fields)

            def answer(version: int, *, is_used: bool) -> None:
                self._count(max(0, version - 1 - pulled), is_used=is_used)
                refused = self._store.num_refused if is_used else 0
                change.done(is_used=is_used, **({"refused": refused} if refused else {}))

            scalars = fields.get("scalars", {})
            if self._synchronous is not None:
                worker = fields.get("worker") or change.client
                one = Contribution(worker, pulled, whole, rows, answer, change.fail, optimizers)
                one = dataclasses.replace(
                    one, origin=change.origin, scalars=scalars, assigned=assigned
                )
                if change.is_of_rerun:
                    self._synchronous.withdraw(change.origin)
                self._synchronous.add(one)
                return
            # Counters of workers that train apart: a worker that is behind sets none back.
            current, limit = self._store.version, self.mode.max_staleness
            is_late = limit is not None and current - pulled > limit
            self._store.set_scalars(scalars, keeps_larger=self.mode.rounds is not None)
            if is_late:
                answer(current, is_used=False)
            else:
                for name, (value, sign) in assigned.items():
                    self._store.assign(name, value, sign=sign)
                answer(self._store.update(whole, rows, optimizers), is_used=True)

    def expect(self, num_needed: int) -> None:
        """Changes the number of workers per synchronous update; updates if enough are waiting.

        Raises:
            RuntimeError: updates are asynchronous.
            ValueError: `num_needed` is not positive.
        """
        with self._store.changing():
            if self._synchronous is None:
                raise RuntimeError(
                    explain(
                        f"Cannot wait for {num_needed} workers: updates are asynchronous.",
                        expected="synchronous updates.",
                        fix="set the rule with UpdateMode(num_needed=...) first.",
                    )
                )
            self._synchronous.expect(num_needed)
            self._sums.expect(num_needed)
            self.mode = dataclasses.replace(self.mode, num_needed=num_needed)

    def flush(self) -> None:
        """Applies the gradients waiting for a synchronous update."""
        with self._store.changing():
            self._sums.flush()
            if self._synchronous is not None:
                self._synchronous.flush()

    def add_summand(self, message: Message, answer: Callable[[np.ndarray], None]) -> None:
        """Adds up values that synchronous workers need before their gradients.

        Fields: `worker`, `place`, and the `version` and `lifetime` of the values used. Array: the
        value. `answer` gets the sum; the value itself if its worker is late, or updates alone.
        """
        fields, (value,) = message.fields, message.arrays
        with self._store.changing():
            version = self._lifetime.version_of(fields)
            if self._synchronous is None or version < self._store.version:
                answer(value)
                return
            self._sums.add(fields["worker"], (version, fields["place"]), value, answer)

    def _count(self, behind: int, *, is_used: bool) -> None:
        with self._counting:
            if is_used:
                self._staleness[behind] += 1
            else:
                self.num_discarded += 1

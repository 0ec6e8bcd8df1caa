"""Pushed gradients on a server: applied, accumulated for a synchronous update, or discarded."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.changes import Change, Lifetime
from stratagem.parameter_server.server.shards import (
    ASYNCHRONOUS,
    UpdateMode,
    UpdateRule,
    combine_rows,
)
from stratagem.parameter_server.server.store import ServerVariables

# Synchronous updates: gradients of all workers but the slowest, summed and applied once.
#
# A worker waits for the update that includes its gradients. Late gradients were computed from old
# values: they are discarded, and the worker continues from the new values.
#
# Source: TF 1.15 sync_replicas_optimizer.py; Chen et al., Revisiting Distributed Synchronous SGD.


@dataclasses.dataclass(frozen=True)
class Contribution:
    """Gradients of one worker.

    Args:
        worker: name of the worker.
        version: version of the values that the gradients were computed from.
        whole: gradients of whole variables, by name.
        rows: distinct row numbers and row gradients, by variable name.
        answer: called when the gradients are used or discarded.
        fail: called with the reason if the update fails.
        optimizers: optimizer name by variable name; "" for variables not listed.
        origin: scheduled function of the worker, and the place of this push in it.
        scalars: optimizer scalars to set before the update: the largest of all workers, as these
            are counters.
        assigned: values to set before the update, and their signs, by name of a variable or slot:
            their mean over the workers, for which one device would have a single value.
    """

    worker: str
    version: int
    whole: Mapping[str, np.ndarray]
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]
    answer: Callable[..., None]
    fail: Callable[[BaseException], None]
    optimizers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    origin: tuple[str, int] = ("", 0)
    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    assigned: Mapping[str, tuple[np.ndarray, int]] = dataclasses.field(
        default_factory=dict[str, tuple[np.ndarray, int]]
    )


class Gathering:
    """Items of workers for an update or a sum, collected by key until enough workers sent one.

    Call within `ServerVariables.changing`. `end` gets a key and the items in the order of the names
    of their workers, for reproducibility: floating-point sums depend on the order.
    """

    def __init__(self, end: Callable[[Any, list[Any]], None]) -> None:
        self._end = end
        self._num_needed = 0
        self.items: dict[Any, dict[str, Any]] = {}

    @property
    def waiting(self) -> set[str]:
        """Names of the workers that wait for others."""
        return {worker for items in self.items.values() for worker in items}

    def add(self, key: object, worker: str, item: object) -> None:
        """Adds what a worker has sent."""
        self.items.setdefault(key, {})[worker] = item
        self.expect(self._num_needed)

    def expect(self, num_needed: int) -> None:
        """Changes the number of workers, as after a loss, and ends what has enough."""
        self._num_needed = num_needed
        for key in [key for key, items in self.items.items() if len(items) >= num_needed]:
            self.end(key)

    def flush(self) -> None:
        """Ends all, when no more workers will send anything."""
        for key in list(self.items):
            self.end(key)

    def end(self, key: object) -> None:
        """Ends one update or sum with the items that are there."""
        items = self.items.pop(key)
        self._end(key, [items[worker] for worker in sorted(items)])


def _summed(
    contributions: list[Contribution],
) -> tuple[dict[str, np.ndarray], dict[str, tuple[np.ndarray, np.ndarray]]]:
    whole: dict[str, np.ndarray] = {}
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for one in contributions:
        for name, gradient in one.whole.items():
            whole[name] = gradient if name not in whole else whole[name] + gradient
        for name, part in one.rows.items():
            parts.setdefault(name, []).append(part)
    rows = {
        name: combine_rows(
            np.concatenate([numbers for numbers, _ in own]),
            np.concatenate([gradients for _, gradients in own]),
        )
        for name, own in parts.items()
    }
    return whole, rows


def _mean_assigned(contributions: list[Contribution]) -> dict[str, tuple[np.ndarray, int]]:
    values: dict[str, list[np.ndarray]] = {}
    signs: dict[str, int] = {}
    for one in contributions:
        for name, (value, sign) in one.assigned.items():
            values.setdefault(name, []).append(value)
            signs[name] = sign
    return {
        name: (own[0] if len(own) == 1 else np.mean(own, 0).astype(own[0].dtype), signs[name])
        for name, own in values.items()
    }


def _largest(contributions: list[Contribution]) -> dict[str, float]:
    """Returns the largest value of each scalar."""
    values: dict[str, float] = {}
    for one in contributions:
        for name, value in one.scalars.items():
            values[name] = max(value, values.get(name, value))
    return values


class Pushes:
    """Applies pushed gradients with the client's optimizers and update mode."""

    def __init__(self, store: ServerVariables, lifetime: Lifetime) -> None:
        self._store = store
        self._lifetime = lifetime
        self._gradients = Gathering(self._update)
        self._summands = Gathering(self._sum)
        # Sums of the update that follows, by version and place: a worker that asks again, because
        # it was restarted, gets the sum that the others have.
        self._sums: dict[tuple[int, int], np.ndarray] = {}
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
    def waiting(self) -> list[str]:
        """Names of the workers waiting for a synchronous update."""
        with self._store.changing():
            return sorted(self._gradients.waiting | self._summands.waiting)

    def set_rule(
        self,
        rule: UpdateRule,
        names: list[str],
        mode: UpdateMode | None = None,
        optimizer: str = "",
    ) -> None:
        """Sets an optimizer and the update mode; None keeps the mode.

        Raises:
            KeyError: no such variable.
            ValueError: the name belongs to a different optimizer.
        """
        with self._store.changing():
            self._store.set_rule(rule, names, optimizer)
            if mode is not None:
                self.set_mode(mode)

    def set_mode(self, mode: UpdateMode) -> None:
        """Sets the update mode.

        Applies pending synchronous gradients first if the mode becomes asynchronous.
        """
        with self._store.changing():
            if not mode.num_needed:
                self.flush()
            self.mode = mode
            self._gradients.expect(mode.num_needed)
            self._summands.expect(mode.num_needed)

    def missing_rules(self, message: Message) -> list[str]:
        """Returns the optimizers of a push that a client must send again after a restart."""
        fields = message.fields
        own = fields.get("optimizers", {})
        return self._store.missing_rules(
            own.get(name, "") for name in [*fields["whole"], *fields["rows"]]
        )

    def is_quick(self, message: Message) -> bool:
        """Returns False if a push may take long: the first one of its shapes compiles programs."""
        fields = message.fields
        whole, rows = fields["whole"], fields["rows"]
        if self.mode.num_needed and rows:  # those of all workers together have another shape
            return False
        numbers = message.arrays[len(whole) : len(whole) + 2 * len(rows) : 2]
        counts = {name: len(own) for name, own in zip(rows, numbers, strict=True)}
        return self._store.has_updated(whole, counts, fields.get("optimizers", {}))

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
            if self.mode.num_needed:
                worker = fields.get("worker") or change.client
                one = Contribution(
                    worker,
                    pulled,
                    whole,
                    rows,
                    answer,
                    change.fail,
                    optimizers,
                    change.origin,
                    scalars,
                    assigned,
                )
                self.contribute(one, is_rerun=change.is_of_rerun)
                return
            current, limit = self._store.version, self.mode.max_staleness
            is_late = limit is not None and current - pulled > limit
            self._store.set_scalars(scalars)
            if is_late:
                answer(current, is_used=False)
            else:
                for name, (value, sign) in assigned.items():
                    self._store.assign(name, value, sign=sign)
                answer(self._store.update(whole, rows, optimizers), is_used=True)

    def contribute(self, one: Contribution, *, is_rerun: bool = False) -> None:
        """Adds gradients of a worker to the next update, which is made if they complete the set.

        Discards pending gradients of the same worker, which has restarted or abandoned them, and
        those of an earlier run of its function. Call within `ServerVariables.changing`.
        """
        version, waiting = self._store.version, self._gradients.items.get(None, {})
        is_late = one.version < version
        for other in list(waiting.values()):
            is_again = other.worker == one.worker and not is_late
            if is_again or (is_rerun and other.origin == one.origin):
                del waiting[other.worker]
                other.answer(version, is_used=False)
        if not waiting:
            self._gradients.items.pop(None, None)
        if is_late:
            one.answer(version, is_used=False)
        else:
            self._gradients.add(None, one.worker, one)

    def _update(self, key: None, contributions: list[Contribution]) -> None:
        try:
            optimizers = {
                name: own for one in contributions for name, own in one.optimizers.items()
            }
            whole, rows = _summed(contributions)
            self._store.set_scalars(_largest(contributions))
            for name, (value, sign) in _mean_assigned(contributions).items():
                self._store.assign(name, value, sign=sign)
            version = self._store.update(whole, rows, optimizers)
        except BaseException as error:
            for one in contributions:
                one.fail(error)
            raise
        for one in contributions:
            one.answer(version, is_used=True)

    def expect(self, num_needed: int) -> None:
        """Changes the number of workers per synchronous update; updates if enough are waiting.

        Raises:
            RuntimeError: updates are asynchronous.
        """
        with self._store.changing():
            if not self.mode.num_needed:
                raise RuntimeError("updates are asynchronous, or no optimizer has come yet")
            self._gradients.expect(num_needed)
            self._summands.expect(num_needed)
            self.mode = dataclasses.replace(self.mode, num_needed=num_needed)

    def flush(self) -> None:
        """Applies the gradients waiting for a synchronous update."""
        with self._store.changing():
            self._summands.flush()
            self._gradients.flush()

    def add_summand(self, message: Message, answer: Callable[[np.ndarray], None]) -> None:
        """Adds up values that synchronous workers need before their gradients.

        Fields: `worker`, `place`, and the `version` and `lifetime` of the values used. Array: the
        value. `answer` gets the sum; the value itself if its worker is late, or updates alone.
        """
        fields, (value,) = message.fields, message.arrays
        with self._store.changing():
            version = self._lifetime.version_of(fields)
            if not self.mode.num_needed or version < self._store.version:
                answer(value)
                return
            for earlier in [key for key in self._summands.items if key[0] != version]:
                self._summands.end(earlier)  # its update was made without those workers
            self._sums = {key: total for key, total in self._sums.items() if key[0] == version}
            key = version, fields["place"]
            if key in self._sums:
                answer(self._sums[key])
            else:
                self._summands.add(key, fields["worker"], (value, answer))

    def _sum(
        self, key: tuple[int, int], items: list[tuple[np.ndarray, Callable[[np.ndarray], None]]]
    ) -> None:
        total = self._sums[key] = np.sum([value for value, _ in items], 0)
        for _, answer in items:
            answer(total)

    def _count(self, behind: int, *, is_used: bool) -> None:
        with self._counting:
            if is_used:
                self._staleness[behind] += 1
            else:
                self.num_discarded += 1

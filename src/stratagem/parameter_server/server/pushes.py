"""Pushed gradients on a server: applied, accumulated for a synchronous update, or discarded."""

from __future__ import annotations

import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Mapping

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


class SynchronousUpdates:
    """Thread-safe accumulator of gradients, which updates once enough workers contributed.

    `num_needed` is the number of workers per update: all but the backup workers.
    """

    def __init__(self, store: ServerVariables, num_needed: int) -> None:
        self._store = store
        self._num_needed = num_needed
        self._waiting: dict[str, Contribution] = {}
        self.num_discarded = 0

    @property
    def waiting(self) -> list[str]:
        """Names of the workers waiting for the update."""
        with self._store.changing():
            return sorted(self._waiting)

    def add(self, contribution: Contribution) -> None:
        """Adds gradients of a worker, and updates if they complete the set.

        Discards earlier pending gradients of the same worker, which has restarted or abandoned
        them.
        """
        with self._store.changing():
            if contribution.version < self._store.version:
                self._discard(contribution)
                return
            before = self._waiting.pop(contribution.worker, None)
            if before is not None:
                self._discard(before)
            self._waiting[contribution.worker] = contribution
            self._update_if_complete()

    def withdraw(self, origin: tuple[str, int]) -> None:
        """Discards the pending gradients of an earlier run of a function."""
        with self._store.changing():
            for worker, one in list(self._waiting.items()):
                if one.origin == origin:
                    self._discard(self._waiting.pop(worker))

    def expect(self, num_needed: int) -> None:
        """Changes `num_needed` after a worker was lost or returned.

        Updates if enough workers are waiting.
        """
        with self._store.changing():
            self._num_needed = num_needed
            self._update_if_complete()

    def flush(self) -> None:
        """Updates with the pending gradients, when no more workers will contribute."""
        with self._store.changing():
            if self._waiting:
                self._update()

    def _discard(self, contribution: Contribution) -> None:
        self.num_discarded += 1
        contribution.answer(self._store.version, is_used=False)

    def _update_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._num_needed:
            self._update()

    def _update(self) -> None:
        # Sort for reproducibility: floating-point sums depend on the order.
        contributions = [self._waiting[worker] for worker in sorted(self._waiting)]
        self._waiting.clear()
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


class SynchronousSums:
    """Accumulator of values that workers add up before the gradients of an update.

    Call within `ServerVariables.changing`. A sum belongs to the update that follows it: its key is
    the version of the store and a place. A worker that asks again, because it was restarted, gets
    the sum that the others have.
    """

    def __init__(self, store: ServerVariables) -> None:
        self._store = store
        self._num_needed = 0
        self._waiting: dict[tuple[int, int], dict[str, _Summand]] = {}
        self._sums: dict[tuple[int, int], np.ndarray] = {}

    @property
    def waiting(self) -> list[str]:
        """Names of the workers waiting for a sum."""
        with self._store.changing():
            return sorted({worker for values in self._waiting.values() for worker in values})

    def add(
        self,
        worker: str,
        key: tuple[int, int],
        value: np.ndarray,
        answer: Callable[[np.ndarray], None],
    ) -> None:
        """Adds a worker's value; `answer` gets the sum of all."""
        for before in [one for one in self._waiting if one[0] != self._store.version]:
            self._end(before)  # its update was made without those workers
        self._sums = {one: total for one, total in self._sums.items() if one[0] == key[0]}
        if key in self._sums:
            answer(self._sums[key])
            return
        self._waiting.setdefault(key, {})[worker] = _Summand(value, answer)
        self._end_complete()

    def expect(self, num_needed: int) -> None:
        """Changes the number of workers, and ends the sums that have enough."""
        self._num_needed = num_needed
        self._end_complete()

    def flush(self) -> None:
        """Ends all sums with the values that are there."""
        for key in list(self._waiting):
            self._end(key)

    def _end_complete(self) -> None:
        for key, values in list(self._waiting.items()):
            if len(values) >= self._num_needed:
                self._end(key)

    def _end(self, key: tuple[int, int]) -> None:
        values = self._waiting.pop(key)
        # Sort for reproducibility: floating-point sums depend on the order.
        total = np.sum([values[worker].value for worker in sorted(values)], 0)
        self._sums[key] = total
        for one in values.values():
            one.answer(total)


@dataclasses.dataclass(frozen=True)
class _Summand:
    """Value of one worker, and the function that gets the sum."""

    value: np.ndarray
    answer: Callable[[np.ndarray], None]


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
        self._synchronous = SynchronousUpdates(store, 0)
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
    def waiting(self) -> list[str]:
        """Names of the workers waiting for a synchronous update."""
        return sorted({*self._synchronous.waiting, *self._sums.waiting})

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
            self._synchronous.expect(mode.num_needed)
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
                if change.is_of_rerun:
                    self._synchronous.withdraw(change.origin)
                self._synchronous.add(one)
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

    def expect(self, num_needed: int) -> None:
        """Changes the number of workers per synchronous update; updates if enough are waiting.

        Raises:
            RuntimeError: updates are asynchronous.
        """
        with self._store.changing():
            if not self.mode.num_needed:
                raise RuntimeError("updates are asynchronous, or no optimizer has come yet")
            self._synchronous.expect(num_needed)
            self._sums.expect(num_needed)
            self.mode = dataclasses.replace(self.mode, num_needed=num_needed)

    def flush(self) -> None:
        """Applies the gradients waiting for a synchronous update."""
        with self._store.changing():
            self._sums.flush()
            self._synchronous.flush()

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
            self._sums.add(fields["worker"], (version, fields["place"]), value, answer)

    def _count(self, behind: int, *, is_used: bool) -> None:
        with self._counting:
            if is_used:
                self._staleness[behind] += 1
            else:
                self.num_discarded += 1

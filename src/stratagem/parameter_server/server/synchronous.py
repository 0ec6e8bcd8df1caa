"""Synchronous updates: gradients of all workers but the slowest, summed and applied once.

A worker waits for the update that includes its gradients. Late gradients were computed from old
values: they are discarded, and the worker continues from the new values.

Source: TF 1.15 sync_replicas_optimizer.py; Chen et al., Revisiting Distributed Synchronous SGD.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from stratagem.messages import explain
from stratagem.parameter_server.server.rows import combine_rows
from stratagem.parameter_server.server.store import ServerVariables

__all__ = ["Answer", "Contribution", "SynchronousUpdates"]


class Answer(Protocol):
    """Callback that reports whether a worker's gradients were used."""

    def __call__(self, version: int, *, is_used: bool) -> None:
        """Called once, with the store's version at that time and its lock held."""
        ...


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
    """

    worker: str
    version: int
    whole: Mapping[str, np.ndarray]
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]
    answer: Answer
    fail: Callable[[BaseException], None]
    optimizers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    origin: tuple[str, int] = ("", 0)
    scalars: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])


class SynchronousUpdates:
    """Thread-safe accumulator of gradients, which updates once enough workers contributed.

    `num_needed` is the number of workers per update: all but the backup workers. `averages` applies
    the mean over the workers, not the sum. Raises ValueError if `num_needed` is not positive.
    """

    def __init__(self, store: ServerVariables, num_needed: int, *, averages: bool = False) -> None:
        self._store = store
        self._averages = averages
        self._num_needed = _checked(num_needed)
        self._waiting: dict[str, Contribution] = {}
        self.num_discarded = 0

    @property
    def num_waiting(self) -> int:
        """Number of workers waiting for the update."""
        return len(self._waiting)

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

        Updates if enough workers are waiting. Raises ValueError if it is not positive.
        """
        with self._store.changing():
            self._num_needed = _checked(num_needed)
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
        if len(self._waiting) >= self._num_needed:
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
            if self._averages:  # no rows: tables have no local updates
                whole = {name: total / len(contributions) for name, total in whole.items()}
            self._store.set_scalars(_largest(contributions), keeps_larger=self._averages)
            version = self._store.update(whole, rows, optimizers)
        except BaseException as error:
            for one in contributions:
                one.fail(error)
            raise
        for one in contributions:
            one.answer(version, is_used=True)


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


def _largest(contributions: list[Contribution]) -> dict[str, float]:
    """Returns the largest value of each scalar."""
    values: dict[str, float] = {}
    for one in contributions:
        for name, value in one.scalars.items():
            values[name] = max(value, values.get(name, value))
    return values


def _checked(num_needed: int) -> int:
    if num_needed < 1:
        raise ValueError(
            explain(
                f"num_needed={num_needed} is not a valid number of workers per synchronous update.",
                expected="at least 1 worker.",
                fix="use fewer backup workers than workers.",
            )
        )
    return num_needed

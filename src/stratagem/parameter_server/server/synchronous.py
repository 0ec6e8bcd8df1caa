"""Synchronous updates: the gradients of all workers but the slowest, added up and applied once.

A worker waits until the update that it is part of is made. One that comes too late is told so, and
goes on from the new values: its gradients belong to values that are no more.

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
    """Answers a worker: its gradients were used or discarded."""

    def __call__(self, version: int, *, is_used: bool) -> None:
        """Called once, with the number of updates then, and whether the gradients are in one.

        Nobody changes the store meanwhile.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The gradients of one worker.

    Args:
        worker: whose they are.
        version: of the values that they were computed from.
        whole: of variables, by name.
        rows: of single rows, by name of the variable: their numbers, each once, and gradients.
        answer: called when they were used or discarded.
        fail: called when the update could not be made, with the reason.
        optimizers: by name of the variable; "" for those that are not named.
    """

    worker: str
    version: int
    whole: Mapping[str, np.ndarray]
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]
    answer: Answer
    fail: Callable[[BaseException], None]
    optimizers: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])


class SynchronousUpdates:
    """Collects gradients until there are enough for an update. Any thread may call it.

    Args:
        store: whose variables are updated.
        num_needed: how many workers make an update: all but the backup workers.

    Raises:
        ValueError: not a positive number.
    """

    def __init__(self, store: ServerVariables, num_needed: int) -> None:
        self._store = store
        self._num_needed = _checked(num_needed)
        self._waiting: dict[str, Contribution] = {}
        self.num_discarded = 0

    @property
    def num_waiting(self) -> int:
        """Number of workers that wait for others."""
        return len(self._waiting)

    @property
    def waiting(self) -> list[str]:
        """The names of the workers that wait for others."""
        with self._store.changing():
            return sorted(self._waiting)

    def add(self, contribution: Contribution) -> None:
        """Takes the gradients of a worker; updates where they are the last that was waited for.

        Args:
            contribution: the gradients. Those that the worker has sent before, and that wait, are
                discarded: it was started again, or has given them up.
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

    def expect(self, num_needed: int) -> None:
        """Changes how many workers make an update: one was lost, or has come back.

        Args:
            num_needed: how many, at least 1. Updates if so many wait.

        Raises:
            ValueError: not a positive number.
        """
        with self._store.changing():
            self._num_needed = _checked(num_needed)
            self._update_if_complete()

    def flush(self) -> None:
        """Updates with the gradients that are there: no more workers will come."""
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
        # In one order, whoever came first: floating-point sums depend on it.
        contributions = [self._waiting[worker] for worker in sorted(self._waiting)]
        self._waiting.clear()
        try:
            optimizers = {
                name: own for one in contributions for name, own in one.optimizers.items()
            }
            version = self._store.update(*_summed(contributions), optimizers)
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


def _checked(num_needed: int) -> int:
    if num_needed < 1:
        raise ValueError(
            explain(
                f"num_needed={num_needed}: an update of the gradients of so many workers.",
                expected="at least 1 worker that is waited for.",
                fix="have fewer backup workers than workers.",
            )
        )
    return num_needed

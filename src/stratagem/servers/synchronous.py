"""Synchronous updates: the gradients of all workers but the slowest, added up and applied once.

A worker waits until the update that it is part of is made. One that comes too late is told so, and
goes on from the new values: its gradients belong to values that are no more.

Source: TF 1.15 sync_replicas_optimizer.py; Chen et al., Revisiting Distributed Synchronous SGD.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from stratagem.messages import explain
from stratagem.servers.rows import combine_rows
from stratagem.servers.store import Store

__all__ = ["Answer", "Contribution", "SynchronousUpdates"]


class Answer(Protocol):
    """Tells a worker what has become of its gradients."""

    def __call__(self, version: int, *, is_used: bool) -> None:
        """Called once, with the number of updates then, and whether the gradients are in one."""
        ...


@dataclasses.dataclass(frozen=True)
class Contribution:
    """The gradients of one worker.

    Args:
        client: whose they are.
        version: of the values that they were computed from.
        whole: of variables, by name.
        rows: of single rows, by name of the variable: their numbers, each once, and gradients.
        answer: called when they were used or discarded.
    """

    client: str
    version: int
    whole: Mapping[str, np.ndarray]
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]
    answer: Answer


class SynchronousUpdates:
    """Collects gradients until there are enough for an update. Any thread may call it.

    Args:
        store: whose variables are updated.
        num_needed: how many workers make an update: all but the backup workers.

    Raises:
        ValueError: not a positive number.
    """

    def __init__(self, store: Store, num_needed: int) -> None:
        if num_needed < 1:
            raise ValueError(
                explain(
                    f"num_needed={num_needed}: an update of the gradients of so many workers.",
                    expected="at least 1 worker that is waited for.",
                    fix="have fewer backup workers than workers.",
                )
            )
        self._store = store
        self._num_needed = num_needed
        self._lock = threading.Lock()
        self._waiting: dict[str, Contribution] = {}
        self.num_discarded = 0

    def add(self, contribution: Contribution) -> None:
        """Takes the gradients of a worker; updates where they are the last that was waited for.

        Args:
            contribution: the gradients. A second one of a client replaces its first.
        """
        with self._lock:
            version = self._store.version
            if contribution.version < version:
                self.num_discarded += 1
                is_late, complete = True, []
            else:
                is_late = False
                self._waiting[contribution.client] = contribution
                complete = self._take() if len(self._waiting) >= self._num_needed else []
            if complete:
                version = self._update(complete)
        if is_late:
            contribution.answer(version, is_used=False)
        for one in complete:
            one.answer(version, is_used=True)

    def flush(self) -> None:
        """Updates with the gradients that are there: no more workers will come."""
        with self._lock:
            complete = self._take()
            version = self._update(complete) if complete else 0
        for one in complete:
            one.answer(version, is_used=True)

    def _take(self) -> list[Contribution]:
        # In one order, whoever came first: floating-point sums depend on it.
        taken = [self._waiting[client] for client in sorted(self._waiting)]
        self._waiting.clear()
        return taken

    def _update(self, contributions: list[Contribution]) -> int:
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
        return self._store.update(whole, rows)

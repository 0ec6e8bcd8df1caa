"""Warnings about updates that servers lost, and about those that they did not repeat."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping

from stratagem.errors import explain
from stratagem.parameter_server.server.changes import by_kind


class LostUpdates:
    """Warns when a process sees that servers lost updates, or that functions ran again.

    `losses` has the largest numbers of lost updates so far, by server, run and kind; `num_repeated`
    counts updates that a function made again and servers dropped. `worker` None means the only
    process.
    """

    def __init__(self, worker: int | None = None) -> None:
        self._name = "this process" if worker is None else f"worker {worker}"
        self.losses: Counter[str] = Counter()
        self.num_repeated = 0

    def note(self, losses: Mapping[str, int]) -> None:
        """Warns if `losses`, a client's `SeenVersions.losses`, have grown."""
        if not losses:
            return
        before = self.losses
        self.losses = before | Counter(dict(losses))
        if self.losses == before:
            return
        counts = by_kind(self.losses)
        total = counts.total()
        lost = "1 update was" if total == 1 else f"{total} updates were"
        kinds = ", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items()))
        warnings.warn(
            explain(
                f"Parameter servers restarted from their journals: {self._name} has seen that "
                f"{lost} lost in all ({kinds}). Training continues.",
                expected="servers that run until the end of training.",
                fix="look at the servers' logs to find out why they stopped. To lose no update, "
                "set sg.coordinator.options(durable_updates=True).",
            ),
            RuntimeWarning,
            stacklevel=2,
        )

    def note_repeated(self, count: int) -> None:
        """Warns if `count`, the repeated updates of a worker's run, is not 0 for the first time.

        The count begins again when the worker restarts.
        """
        if count > 0 and not self.num_repeated:
            warnings.warn(
                explain(
                    f"A function ran again on {self._name}, because an earlier run was lost: "
                    f"{count} of its updates had been applied and were not applied again.",
                    expected="functions that make their updates in the same order each time.",
                    fix="nothing, if they do. See the counts in ClusterCoordinator.updates().",
                ),
                RuntimeWarning,
                stacklevel=2,
            )
        self.num_repeated = max(self.num_repeated, count)

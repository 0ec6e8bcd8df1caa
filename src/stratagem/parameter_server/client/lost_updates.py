"""Warning about updates lost in server restarts."""

from __future__ import annotations

import warnings

from stratagem.messages import explain

__all__ = ["LostUpdates"]


class LostUpdates:
    """Warns when a process sees that servers lost updates.

    `count` is the largest number so far. `worker` None means the only process.
    """

    def __init__(self, worker: int | None = None) -> None:
        self._name = "this process" if worker is None else f"worker {worker}"
        self.count = 0

    def note(self, count: int) -> None:
        """Warns if `count`, the number of lost updates seen since the start, has grown."""
        if count <= self.count:
            return
        self.count = count
        lost = "1 update was" if count == 1 else f"{count} updates were"
        warnings.warn(
            explain(
                f"Parameter servers restarted from their journals: {self._name} has seen that "
                f"{lost} lost in all. Training continues.",
                expected="servers that run until the end of training.",
                fix="look at the servers' logs to find out why they stopped.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )

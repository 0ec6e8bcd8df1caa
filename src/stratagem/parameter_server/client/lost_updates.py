"""Warnings about updates that were lost with servers."""

from __future__ import annotations

import warnings

from stratagem.messages import explain

__all__ = ["LostUpdates"]


class LostUpdates:
    """Warns when a process has seen that servers had made updates and lost them.

    `count` is the largest number that was told so far.

    Args:
        worker: the index of the worker; None for the only process.
    """

    def __init__(self, worker: int | None = None) -> None:
        self._name = "this process" if worker is None else f"worker {worker}"
        self.count = 0

    def note(self, count: int) -> None:
        """Warns, once for each number.

        Args:
            count: how many updates the worker has seen to be lost since it began.
        """
        if count <= self.count:
            return
        self.count = count
        warnings.warn(
            explain(
                f"Parameter servers were started again, and {self._name} has seen that "
                f"{count} updates were lost in all.",
                expected="servers that live.",
                fix="training goes on from their journals; look at why they ended.",
            ),
            RuntimeWarning,
            stacklevel=2,
        )

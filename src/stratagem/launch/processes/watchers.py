"""Callbacks for losses and returns of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stratagem.background_errors import report_error


@dataclasses.dataclass(frozen=True)
class Watchers:
    """Callbacks of `ClusterProcesses.watch`; an error in one is reported, and watching continues.

    Each takes the index of a process, and the reason of its loss, its new address, or the error
    that ended its restarts.
    """

    on_lost: Callable[[int, str], None]
    on_returned: Callable[[int, str], None]
    on_given_up: Callable[[int, Exception], None]

    def report(self, event: Callable[[Watchers], None]) -> None:
        """Calls one of the callbacks by `event`."""
        try:
            event(self)
        except Exception as error:  # noqa: BLE001 - watching must continue
            report_error(error)

"""Functions that hear of the losses and returns of processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from stratagem.background_errors import report_error

__all__ = ["Watchers"]


@dataclasses.dataclass(frozen=True)
class Watchers:
    """Functions that are called with the index of a process; their errors end no watching.

    Args:
        on_lost: called with why as well, when it has died.
        on_returned: called with its new address as well.
        on_given_up: called with why as well, when it is not started any more.
    """

    on_lost: Callable[[int, str], None]
    on_returned: Callable[[int, str], None]
    on_given_up: Callable[[int, Exception], None]

    def tell(self, event: Callable[[Watchers], None]) -> None:
        """Reports an event to one of the functions."""
        try:
            event(self)
        except Exception as error:  # noqa: BLE001 - the others are watched on
            report_error(error)

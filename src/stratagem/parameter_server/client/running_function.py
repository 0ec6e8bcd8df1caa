"""A scheduled function while it runs on a worker, which identifies its updates."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any


@dataclasses.dataclass(frozen=True)
class RunningFunction:
    """One run of a function. Servers make each of its updates once, however often it runs.

    It must make its updates in the same order each time. `is_rerun` is True if it may have run
    before. `order` is the number of the coordinator's message to this worker; servers may forget
    the functions of messages before `first_open`, because none of them will run again.
    """

    name: str
    is_rerun: bool = False
    order: int = 0
    first_open: int = 0
    _places: itertools.count[int] = dataclasses.field(
        default_factory=lambda: itertools.count(1), init=False
    )

    def update_fields(self) -> dict[str, Any]:
        """Returns the fields of the function's next update."""
        fields: dict[str, Any] = {
            "function": self.name,
            "place": next(self._places),
            "order": self.order,
            "first_open": self.first_open,
        }
        if self.is_rerun:
            fields["is_rerun"] = True
        return fields

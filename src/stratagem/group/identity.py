"""Which member of a group a process is."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Identity"]


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which member of a group this process is.

    Args:
        process_id: its number, from 0.
        labels: the names of all processes in messages, by their number.
        host: of process 0.
        port: where process 0 listens.
        same: what has to be equal on all processes, such as versions.
    """

    process_id: int
    labels: tuple[str, ...]
    host: str
    port: int
    same: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def label(self) -> str:
        """The name of this process."""
        return self.labels[self.process_id]

    @property
    def num_processes(self) -> int:
        """How many there are."""
        return len(self.labels)

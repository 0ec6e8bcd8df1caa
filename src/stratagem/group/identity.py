"""Identity of a process within its group."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Identity"]


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of this process within its group.

    Args:
        process_id: from 0.
        labels: names of all processes in messages, by process id.
        host: of process 0.
        port: at which process 0 listens.
        same: values that must be equal on all processes, such as versions.
    """

    process_id: int
    labels: tuple[str, ...]
    host: str
    port: int
    same: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def label(self) -> str:
        """Name of this process in messages."""
        return self.labels[self.process_id]

    @property
    def num_processes(self) -> int:
        """Number of processes in the group."""
        return len(self.labels)

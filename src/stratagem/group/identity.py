"""Identity of a process within its group."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Identity:
    """Identity of this process within its group.

    `labels` name all processes in messages, by process id. Process 0 listens at `host` and `port`.
    The values in `same`, such as versions, must be equal on all processes. `addresses` has the host
    and port of each process, if the cluster lists them.
    """

    process_id: int
    labels: tuple[str, ...]
    host: str
    port: int
    same: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    addresses: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        """Name of this process in messages."""
        return self.labels[self.process_id]

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of all processes, if they are known."""
        return tuple(dict.fromkeys(host for host, _ in self.addresses))

    @property
    def num_processes(self) -> int:
        """Number of processes in the group."""
        return len(self.labels)

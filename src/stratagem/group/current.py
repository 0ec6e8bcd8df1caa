"""The group of this process, at most one for its lifetime; its identity; its random numbers."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem import logs

if TYPE_CHECKING:
    from stratagem.group.member import Group

_groups: list[Group] = []


def current_group() -> Group | None:
    """Returns the group of this process, or None for a single process."""
    return _groups[0] if _groups else None


def set_current_group(group: Group) -> None:
    """Sets the group of this process, once."""
    assert not _groups
    _groups.append(group)
    logs.set_task(group.identity.label, group.identity.process_id)


# Identity of a process within its group.


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


# Synchronization of Python's and NumPy's global random state across processes.


def agree_on_random_state() -> None:
    """Copies process 0's state of Python's and NumPy's global generators to the group.

    Keras draws seeds of initializers and the order of shuffled arrays from them.
    """
    group = current_group()
    if group is None:
        return
    is_first = group.process_id == 0
    own = (random.getstate(), np.random.get_state()) if is_first else None
    state = group.exchange("the random state", own)[0]
    # A process that joins an elastic group later has only its own values until then.
    if not is_first and state is not None:
        random.setstate(state[0])
        np.random.set_state(state[1])

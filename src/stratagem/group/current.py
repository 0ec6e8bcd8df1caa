"""The processes of a cluster: small Python values that they exchange outside of steps.

All processes must make the same calls in the same order; each call carries its name and number, so
divergence is detected. With a single process they return at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import random
from typing import TYPE_CHECKING, Any

import numpy as np

from stratagem import logs

if TYPE_CHECKING:
    from stratagem.group.member import Group

__all__ = ["all_gather_object", "barrier", "broadcast_object"]

# The group of this process, at most one for its lifetime.

_groups: list[Group] = []


def current_group() -> Group | None:
    """Returns the group of this process, or None for a single process."""
    return _groups[0] if _groups else None


def set_current_group(group: Group) -> None:
    """Sets the group of this process, once."""
    assert not _groups
    _groups.append(group)
    logs.set_task(group.identity.label, group.identity.process_id)


_STDERR = 2  # sys.stderr has no descriptor in a notebook


def print_stacks(label: str) -> None:
    """Prints where all threads are: the error of a limit says where a program is, and not why."""
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"{label}: stacks at the time limit.\n".encode())
    faulthandler.dump_traceback(_STDERR)


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


# What is exchanged by name: `sg.collectives.host`.

_SETTING = "timeout_s, or STRATAGEM_BARRIER_TIMEOUT_S"


def all_gather_object(
    value: object, *, name: str = "all_gather_object", timeout_s: float | None = None
) -> list[Any]:
    """Returns the values of all processes. Call on every process.

    Args:
        value: None, a bool, a number, a string, bytes, a NumPy array, or a list, tuple or dict with
            string keys of these.
        name: name of the call, the same on all processes.
        timeout_s: seconds to wait for the others; None for `STRATAGEM_BARRIER_TIMEOUT_S`.

    Returns:
        One value per process, in process order.

    Raises:
        DeadlineExceededError: a process did not arrive; the message names it.
        UnavailableError: a process was lost.
        RuntimeError: a process made another call.
        TypeError: a value of another type.

    Example:
        >>> from stratagem.strategies.collectives import host
        >>> host.all_gather_object({"examples": 3})
        [{'examples': 3}]

    Source: PyTorch, torch.distributed.all_gather_object.
    """
    group = current_group()
    if group is None:
        return [value]
    return group.exchange(name, value, timeout_s=timeout_s, setting=_SETTING)


def broadcast_object(
    value: object = None, *, name: str = "broadcast_object", timeout_s: float | None = None
) -> Any:
    """Returns the value of process 0. Call on every process.

    Args:
        value: as for `all_gather_object`; ignored except on process 0.
        name: name of the call, the same on all processes.
        timeout_s: seconds to wait for the others; None for `STRATAGEM_BARRIER_TIMEOUT_S`.

    Returns:
        The value of process 0.

    Raises:
        DeadlineExceededError: a process did not arrive. Other errors are as for
            `all_gather_object`.

    Example:
        >>> sg.collectives.host.broadcast_object({"seed": 7})  # process 0's, on every process
        {'seed': 7}

    Source: PyTorch, torch.distributed.broadcast_object_list.
    """
    group = current_group()
    if group is None:
        return value
    own = value if group.process_id == 0 else None
    return all_gather_object(own, name=name, timeout_s=timeout_s)[0]


def barrier(name: str = "barrier", *, timeout_s: float | None = None) -> None:
    """Waits until all processes have arrived. Call on every process.

    Args:
        name: name of the call, the same on all processes.
        timeout_s: seconds to wait for the others; None for `STRATAGEM_BARRIER_TIMEOUT_S`.

    Raises:
        DeadlineExceededError: a process did not arrive. Other errors are as for
            `all_gather_object`.

    Example:
        >>> sg.collectives.host.barrier("data is prepared")  # returns at once in a single process

    Source: PyTorch, torch.distributed.barrier.
    """
    all_gather_object(None, name=name, timeout_s=timeout_s)

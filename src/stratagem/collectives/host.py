"""Small values between the processes of a cluster, by way of their hosts.

All processes call these at the same place; each call carries its name and its number, so that
processes that have come apart hear of it. In a process by itself they return at once.
"""

from __future__ import annotations

from typing import Any

from stratagem.group import current_group

__all__ = ["all_gather_object", "barrier", "broadcast_object"]

_SETTING = "timeout_s, or STRATAGEM_BARRIER_TIMEOUT_S"


def all_gather_object(
    value: Any, *, name: str = "all_gather_object", timeout_s: float | None = None
) -> list[Any]:
    """Returns the values of all processes. Call on every process.

    Args:
        value: None, a bool, a number, a string, bytes, a NumPy array, or a list, tuple or dict with
            string keys of these.
        name: of the place, the same on all processes.
        timeout_s: how long to wait for the others; None for `STRATAGEM_BARRIER_TIMEOUT_S`.

    Returns:
        One value a process, in their order.

    Raises:
        DeadlineExceededError: a process did not come; the message names it.
        UnavailableError: one was lost. RuntimeError: one is at another call.
        TypeError: a value of another type.

    Example:
        >>> from stratagem.collectives import host
        >>> host.all_gather_object({"examples": 3})
        [{'examples': 3}]

    Source: PyTorch, torch.distributed.all_gather_object.
    """
    group = current_group()
    if group is None:
        return [value]
    return group.exchange(name, value, timeout_s=timeout_s, setting=_SETTING)


def broadcast_object(
    value: Any = None, *, name: str = "broadcast_object", timeout_s: float | None = None
) -> Any:
    """Returns the value of process 0. Call on every process.

    Args:
        value: as for `all_gather_object`; only that of process 0 matters.
        name: of the place, the same on all processes.
        timeout_s: how long to wait for the others; None for `STRATAGEM_BARRIER_TIMEOUT_S`.

    Returns:
        The value of process 0.

    Raises:
        DeadlineExceededError: and what else `all_gather_object` raises.

    Source: PyTorch, torch.distributed.broadcast_object_list.
    """
    group = current_group()
    if group is None:
        return value
    own = value if group.process_id == 0 else None
    return all_gather_object(own, name=name, timeout_s=timeout_s)[0]


def barrier(name: str = "barrier", *, timeout_s: float | None = None) -> None:
    """Returns when all processes have come here. Call on every process.

    Args:
        name: of the place, the same on all processes.
        timeout_s: how long to wait for the others; None for `STRATAGEM_BARRIER_TIMEOUT_S`.

    Raises:
        DeadlineExceededError: and what else `all_gather_object` raises.

    Source: PyTorch, torch.distributed.barrier.
    """
    all_gather_object(None, name=name, timeout_s=timeout_s)

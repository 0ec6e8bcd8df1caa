"""Host-side collectives: small Python values exchanged between the processes of a cluster.

All processes must make the same calls in the same order; each call carries its name and number, so
divergence is detected. With a single process they return at once.
"""

from __future__ import annotations

from typing import Any

from stratagem.group.current import current_group

__all__ = ["all_gather_object", "barrier", "broadcast_object"]

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

"""What one process does for all of a group, or all do: an error of one is an error of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from stratagem.group import current_group
from stratagem.messages import explain

__all__ = ["agreed_with_first", "done_by_all", "done_by_first"]

_Result = TypeVar("_Result")


def done_by_first(name: str, work: Callable[[], None]) -> None:
    """Lets process 0 do something, for which the others wait.

    Args:
        name: of the place, the same on all processes.
        work: what to do.

    Raises:
        RuntimeError: process 0 could not; there its own error is raised.
    """
    group = current_group()
    if group is None or group.process_id == 0:
        done_by_all(name, work)
    else:
        done_by_all(name, lambda: None)


def agreed_with_first(name: str, look: Callable[[], _Result]) -> _Result:
    """Returns what process 0 sees; folders and clocks may differ between machines.

    Args:
        name: of the place, the same on all processes.
        look: what to look at; its result is what JSON can hold.

    Returns:
        What it returned on process 0.
    """
    group = current_group()
    if group is None:
        return look()
    return group.exchange(name, look() if group.process_id == 0 else None)[0]


def done_by_all(name: str, work: Callable[[], _Result]) -> _Result:
    """Lets every process do something, and none go on before all have.

    Args:
        name: of the place, the same on all processes.
        work: what to do; it may not wait for the others.

    Returns:
        What it returned here.

    Raises:
        RuntimeError: another process could not; where one could not, its own error is raised.
    """
    group = current_group()
    if group is None:
        return work()
    error: Exception | None = None
    result: _Result | None = None
    try:
        result = work()
    except Exception as raised:  # noqa: BLE001 - raised again when the others know
        error = raised
    told = group.exchange(name, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for label, text in zip(group.identity.labels, told, strict=True):
        if text is not None:
            raise RuntimeError(
                explain(
                    f"{label} failed in {name}: {text}",
                    expected="all processes to do it, or none.",
                    fix="see its log for the whole error.",
                )
            )
    return result  # type: ignore[return-value]

"""What one process does for all of a group, or all do: an error of one is an error of each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stratagem import environment
from stratagem.errors import DataLossError, NotFoundError
from stratagem.group import current_group
from stratagem.messages import explain

__all__ = ["done_by_all", "done_by_first", "is_first"]

_Result = TypeVar("_Result")

# Raised as what they are on the others, too: programs tell these apart.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        DataLossError,
        FileExistsError,
        ImportError,
        NotFoundError,
        OSError,
        TypeError,
        ValueError,
    )
}


def is_first() -> bool:
    """Whether this is process 0, or a process by itself."""
    group = current_group()
    return group is None or group.process_id == 0


def done_by_first(name: str, work: Callable[[], _Result]) -> _Result:
    """Lets process 0 do something, for which the others wait.

    Args:
        name: of the place, the same on all processes.
        work: what to do; where there are several processes its result is what JSON can hold.

    Returns:
        What it returned on process 0.

    Raises:
        Exception: process 0 could not; each process raises an error of the same class, or a
            RuntimeError.
    """
    group = current_group()
    if group is None:
        return work()
    return _told(name, work if group.process_id == 0 else None, with_results=True)[0]


def done_by_all(name: str, work: Callable[[], _Result]) -> _Result:
    """Lets every process do something, and none go on before all have.

    Args:
        name: of the place, the same on all processes.
        work: what to do; it may not wait for the others.

    Returns:
        What it returned here.

    Raises:
        Exception: a process could not; where it was another one, its error's class, or a
            RuntimeError, with its name.
    """
    if current_group() is None:
        return work()
    kept: list[_Result] = []
    _told(name, lambda: kept.append(work()), with_results=False)
    return kept[0]


def _told(name: str, work: Callable[[], Any] | None, *, with_results: bool) -> list[Any]:
    """Does something, and returns what came of it on each process."""
    group = current_group()
    assert group is not None
    error: Exception | None = None
    result: Any = None
    try:
        result = None if work is None else work()
    except Exception as raised:  # noqa: BLE001 - raised again when the others know
        error = raised
    own = {
        "result": result if with_results and error is None else None,
        "error": None if error is None else [type(error).__name__, str(error)],
    }
    told = group.exchange(
        name,
        own,
        timeout_s=environment.read("save_timeout_s"),
        setting="STRATAGEM_SAVE_TIMEOUT_S",
    )
    if error is not None:
        raise error
    for label, other in zip(group.identity.labels, told, strict=True):
        if other["error"] is not None:
            raise _of_another(name, label, *other["error"])
    return [other["result"] for other in told]


def _of_another(name: str, label: str, kind: str, text: str) -> Exception:
    message = explain(
        f"{label} failed in {name}: {kind}: {text}",
        expected="all processes to do it, or none.",
        fix="see its log for the whole error.",
    )
    return _KINDS.get(kind, RuntimeError)(message)

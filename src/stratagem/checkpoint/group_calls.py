"""Calls made on process 0 or on every process of a group, with errors raised on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from stratagem import environment
from stratagem.errors import DataLossError, DeadlineExceededError, NotFoundError
from stratagem.group.current import current_group
from stratagem.messages import explain

_Result = TypeVar("_Result")

# Other processes raise the same class for these, since programs distinguish them.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        DataLossError,
        DeadlineExceededError,
        FileExistsError,
        ImportError,
        NotFoundError,
        OSError,
        TypeError,
        ValueError,
    )
}


def is_first() -> bool:
    """True on process 0 and in a single process."""
    group = current_group()
    return group is None or group.process_id == 0


def run_on_first(name: str, work: Callable[[], _Result]) -> _Result:
    """Calls a function on process 0 and returns its result, which must be JSON, on all processes.

    `name` is the same on all processes. If the call fails, each process raises an error of the
    same class, or a RuntimeError.
    """
    group = current_group()
    if group is None:
        return work()
    return _call_and_exchange(name, work if group.process_id == 0 else None, with_results=True)[0]


def run_on_all(name: str, work: Callable[[], _Result]) -> _Result:
    """Calls a function on every process, waits for all, and returns the local result.

    The function must not wait for other processes. If it fails on one, the others raise an error
    of the same class, or a RuntimeError, that names the failed process.
    """
    if current_group() is None:
        return work()
    results: list[_Result] = []
    _call_and_exchange(name, lambda: results.append(work()), with_results=False)
    return results[0]


def agree_on_all(name: str, own: bool) -> bool:
    """Returns True if `own` is True on every process."""
    if current_group() is None:
        return own
    return all(_call_and_exchange(name, lambda: own, with_results=True))


def _call_and_exchange(
    name: str, work: Callable[[], Any] | None, *, with_results: bool
) -> list[Any]:
    """Calls a function and returns the results of all processes."""
    group = current_group()
    assert group is not None
    error: Exception | None = None
    result: Any = None
    try:
        result = None if work is None else work()
    except Exception as raised:  # noqa: BLE001 - raised again after the exchange
        error = raised
    own = {
        "result": result if with_results and error is None else None,
        "error": None if error is None else [type(error).__name__, str(error)],
    }
    outcomes = group.exchange(
        name,
        own,
        timeout_s=environment.read("save_timeout_s"),
        setting="STRATAGEM_SAVE_TIMEOUT_S",
    )
    if error is not None:
        raise error
    for label, other in zip(group.identity.labels, outcomes, strict=True):
        if other["error"] is not None:
            raise _remote_error(name, label, *other["error"])
    return [other["result"] for other in outcomes]


def _remote_error(name: str, label: str, kind: str, text: str) -> Exception:
    message = explain(
        f"{label} failed in {name}: {kind}: {text}",
        expected="success on all processes, or the same error on all.",
        fix=f"find the traceback in the log of {label}.",
    )
    return _KINDS.get(kind, RuntimeError)(message)

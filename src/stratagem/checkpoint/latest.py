"""Search for the newest checkpoint in a folder, once or as new ones appear."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from stratagem import settings
from stratagem.checkpoint.storage.files import is_whole
from stratagem.checkpoint.storage.shards import silence_error
from stratagem.errors import DataLossError, DeadlineExceededError, NotFoundError, explain
from stratagem.group.current import current_group

# Calls made on process 0 or on every process of a group, with errors raised on all.

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


def agree_on_all(name: str, work: Callable[[], bool]) -> bool:
    """Returns True if a function returns True on every process."""
    if current_group() is None:
        return work()
    return all(_call_and_exchange(name, work, with_results=True))


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
        timeout_s=settings.read("save_timeout_s"),
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


def read_in_time(folder: Path, read: Callable[[], _Result]) -> _Result:
    """Returns what a function reads from a folder of checkpoints; in a group, within the limit.

    A file system that hangs blocks whoever reads for ever, and the others wait. So a thread reads
    there, which is given up with an error of all. The function must not touch devices.
    """
    if current_group() is None:
        return read()
    results: list[_Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(read())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="stratagem-restore", daemon=True)
    thread.start()
    limit_s = float(settings.read("save_timeout_s"))
    thread.join(limit_s)
    if errors:
        raise errors[0]
    if not results:
        raise silence_error(f"This process has not read {folder}", limit_s)
    return results[0]


# A manager that reuses a number first writes the new checkpoint beside the old one.
_NUMBERED = re.compile(r".+-\d+(\.new)?")
_POLL_S = 1.0


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Finds the newest checkpoint in a folder. Call on every process.

    Args:
        checkpoint_dir: folder of checkpoints numbered by `Checkpoint.save`, a `CheckpointManager`
            or an Estimator. Only process 0 needs access to it.

    Returns:
        Path of the newest complete checkpoint, or None if there is none.

    Example:
        >>> import tempfile
        >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = [checkpoint.save(f"{folder}/ckpt") for _ in range(3)]
        ...     print(sg.train.latest_checkpoint(folder) == saved[-1])
        True

    Source: TF 2.21 checkpoint_management.py, latest_checkpoint.
    """
    folder = Path(os.fspath(checkpoint_dir)).absolute()
    name = run_on_first(
        "latest_checkpoint", lambda: read_in_time(folder, lambda: newest_in(folder))
    )
    return None if name is None else str(folder / name)


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields the newest checkpoint of a folder each time a new one appears, each at most once.

    Skips checkpoints that were superseded while the caller was busy.

    Args:
        checkpoint_dir: folder of numbered checkpoints; it need not exist yet.
        min_interval_secs: minimum seconds between two checkpoints.
        timeout: seconds to wait for the next checkpoint; None waits forever.
        timeout_fn: called after `timeout`; True ends the iterator, False waits again.

    Yields:
        Path of the newest checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = sg.train.Checkpoint(step=sg.Variable(0)).save(f"{folder}/ckpt")
        ...     print([one == path for one in sg.train.checkpoints_iterator(folder, timeout=0)])
        [True]

    Source: TF 2.21 checkpoint_utils.py, checkpoints_iterator.
    """
    seen: str | None = None
    while True:
        started_s = time.monotonic()
        newest = _wait_for_other(checkpoint_dir, seen, timeout)
        if newest is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        seen = newest
        yield newest
        time.sleep(max(0.0, started_s + min_interval_secs - time.monotonic()))


def _wait_for_other(
    folder: str | os.PathLike[str], seen: str | None, timeout_s: float | None
) -> str | None:
    """Waits for a checkpoint other than `seen`; returns None after the timeout."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        newest = latest_checkpoint(folder)
        if newest is not None and newest != seen:
            return newest
        if deadline_s is not None and time.monotonic() + _POLL_S > deadline_s:
            return None
        time.sleep(_POLL_S)


def newest_in(folder: Path) -> str | None:
    """Returns the name of the most recently written checkpoint."""
    found: list[tuple[float, int, str]] = []
    for path in folder.glob("*-*"):
        if _NUMBERED.fullmatch(path.name) and is_whole(path):
            number = int(path.name.removesuffix(".new").rpartition("-")[2])
            found.append((path.stat().st_mtime, number, path.name))
    return max(found)[2] if found else None

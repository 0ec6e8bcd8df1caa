"""The newest checkpoint of a folder, and those that are still to come."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stratagem.checkpoint.together import done_by_first
from stratagem.storage import is_whole

__all__ = ["checkpoints_iterator", "latest_checkpoint", "newest_in"]

# A manager that saves under a number once more writes beside the old one first.
_NUMBERED = re.compile(r".+-\d+(\.new)?")
_POLL_S = 1.0


def latest_checkpoint(checkpoint_dir: str | os.PathLike[str]) -> str | None:
    """Finds the newest checkpoint in a folder. Call on every process.

    Args:
        checkpoint_dir: folder of checkpoints that `Checkpoint.save`, a `CheckpointManager` or an
            Estimator has numbered. Only process 0 has to see it.

    Returns:
        Path of the newest one that is whole; None where there is none.

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
    name = done_by_first("latest_checkpoint", lambda: newest_in(folder))
    return None if name is None else str(folder / name)


def checkpoints_iterator(
    checkpoint_dir: str | os.PathLike[str],
    min_interval_secs: float = 0,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
) -> Iterator[str]:
    """Yields checkpoints of a folder as they appear: always the newest, each at most once.

    A checkpoint that comes and goes while the caller works is passed over.

    Args:
        checkpoint_dir: folder of numbered checkpoints; it need not exist yet.
        min_interval_secs: least time between two checkpoints.
        timeout: seconds to wait for the next one; None waits without end.
        timeout_fn: called after `timeout`; True ends the iterator, False waits once more.

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
        newest = _awaited(checkpoint_dir, seen, timeout)
        if newest is None:
            if timeout_fn is None or timeout_fn():
                return
            continue
        seen = newest
        yield newest
        time.sleep(max(0.0, started_s + min_interval_secs - time.monotonic()))


def _awaited(
    folder: str | os.PathLike[str], seen: str | None, timeout_s: float | None
) -> str | None:
    """Waits for a checkpoint other than the one seen; None after the time."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        newest = latest_checkpoint(folder)
        if newest is not None and newest != seen:
            return newest
        if deadline_s is not None and time.monotonic() + _POLL_S > deadline_s:
            return None
        time.sleep(_POLL_S)


def newest_in(folder: Path) -> str | None:
    """Returns the name of the checkpoint that was written last."""
    found: list[tuple[float, int, str]] = []
    for path in folder.glob("*-*"):
        if _NUMBERED.fullmatch(path.name) and is_whole(path):
            number = int(path.name.removesuffix(".new").rpartition("-")[2])
            found.append((path.stat().st_mtime, number, path.name))
    return max(found)[2] if found else None

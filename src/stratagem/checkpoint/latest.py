"""Search for the newest checkpoint in a folder, once or as new ones appear."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from stratagem.checkpoint.group_calls import run_on_first
from stratagem.checkpoint.storage.files import is_whole

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
    name = run_on_first("latest_checkpoint", lambda: newest_in(folder))
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

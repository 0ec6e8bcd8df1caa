"""A series of checkpoints in one folder: which there are, which to keep, which to go on from."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stratagem.background_errors import raise_reported
from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.options import CheckpointOptions
from stratagem.checkpoint.policies import Any as AnyPolicy
from stratagem.checkpoint.policies import (
    KeepEveryHours,
    KeepLatest,
    KeepPolicy,
    Kept,
    Moment,
    SaveEverySteps,
    SavePolicy,
)
from stratagem.checkpoint.saving import Place
from stratagem.checkpoint.together import done_by_first, is_first
from stratagem.errors import DataLossError
from stratagem.messages import explain
from stratagem.storage import COMMIT_MARK, is_whole, wait_for_writing

__all__ = ["CheckpointManager"]

# Ends the name of a checkpoint that is to take the place of another.
_NEW = ".new"


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    number: int
    time_s: float


class CheckpointManager:
    """Saves checkpoints one after the other in a folder, and keeps some of them.

    Args:
        checkpoint: what to save.
        directory: the folder; several machines have to share it.
        max_to_keep: how many of the newest to keep, or a policy that decides; None keeps all.
        keep_checkpoint_every_n_hours: keeps one in so many hours beside these.
        checkpoint_name: how the names of the checkpoints begin.
        step_counter: a variable that counts steps: its value numbers the checkpoints.
        checkpoint_interval: saves only when so many steps are done since the last save, or when a
            policy says so; needs `step_counter`.
        init_fn: called by `restore_or_initialize` where there is no checkpoint.
        last_checkpoint_step: the step of the last save, for the interval, where training goes on
            without restoring.

    Raises:
        ValueError: `max_to_keep` is below 1; or an interval without a counter.

    Example:
        >>> import os, tempfile
        >>> checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = sg.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        ...     saved = [os.path.basename(manager.save()) for _ in range(3)]
        ...     print(saved, len(manager.checkpoints))
        ['ckpt-1', 'ckpt-2', 'ckpt-3'] 2

    Source: TF 2.21 checkpoint_management.py, CheckpointManager.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | KeepPolicy | None,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | SavePolicy | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int = 0,
    ) -> None:
        self.checkpoint = checkpoint
        self._folder = Path(os.fspath(directory)).absolute()
        self._name = checkpoint_name
        self._keep = _keep_policy(max_to_keep, keep_checkpoint_every_n_hours)
        self._counter = step_counter
        self._interval = _save_policy(checkpoint_interval, step_counter)
        self._init_fn = init_fn
        self._saved_step = last_checkpoint_step
        self._saved_time_s = time.monotonic()

    @property
    def directory(self) -> str:
        """The folder."""
        return str(self._folder)

    @property
    def checkpoint_interval(self) -> int | SavePolicy | None:
        """How many steps lie between saves, or the policy that says when to save."""
        policy = self._interval
        return policy.steps if isinstance(policy, SaveEverySteps) else policy

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints, the oldest first: those that are whole, of process 0."""
        return done_by_first(
            "CheckpointManager.checkpoints", lambda: [str(one.path) for one in self._entries()]
        )

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint that is whole; None where there is none."""
        return next(iter(reversed(self.checkpoints)), None)

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
    ) -> str | None:
        """Saves, if it is time, and deletes what is not to be kept. Call on every process.

        Args:
            checkpoint_number: of the checkpoint; None for the step, or a number that counts up.
            check_interval: whether to save only when the interval says so.
            options: how it is written.

        Returns:
            The path; None if it was not time.

        Raises:
            OSError: it could not be written; what was there before still is.
        """
        raise_reported()
        step = None if self._counter is None else int(self._counter)
        if check_interval and step is not None and not self._is_due(step):
            return None
        number = step if checkpoint_number is None else int(checkpoint_number)
        if number is None:
            number = int(self.checkpoint.save_counter) + 1
        folder = self._folder / f"{self._name}-{number}"
        if not is_first():  # TensorFlow's guides delete the folders of other workers afterwards
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
        place = _InSeries(folder, self._sweep)
        path = self.checkpoint.save_as(str(folder), options, place=place)
        self._saved_step, self._saved_time_s = step or 0, time.monotonic()
        return path

    def sync(self) -> None:
        """Waits until what is written behind training is there. Call on every process.

        Raises:
            OSError: it could not be written, and no step has raised that yet.
        """
        self.checkpoint.sync()

    def restore_or_initialize(self, *, skip_damaged: bool = False) -> str | None:
        """Restores the latest checkpoint, or begins anew where there is none.

        Args:
            skip_damaged: go back to an earlier checkpoint where the latest is damaged.

        Returns:
            The path of what was restored; None where there was none, `init_fn` was called then.

        Raises:
            DataLossError: the latest checkpoint is damaged; with `skip_damaged` all are.
            ValueError: it is of other objects, or shapes differ.
        """
        done_by_first("CheckpointManager.restore_or_initialize", wait_for_writing)
        paths = self.checkpoints
        for path in reversed(paths):
            try:
                self.checkpoint.restore(path, CheckpointOptions(restore_components=True))
                if skip_damaged:  # what objects wait for may be damaged, too
                    self.checkpoint.hold()
            except DataLossError:
                if not skip_damaged or path == paths[0]:
                    raise
                continue
            self._saved_step = 0 if self._counter is None else int(self._counter)
            self._saved_time_s = time.monotonic()
            return path
        if self._init_fn is not None:
            self._init_fn()
        return None

    def _is_due(self, step: int) -> bool:
        policy = self._interval
        if policy is None:
            return True
        moment = Moment(step, time.monotonic(), self._saved_step, self._saved_time_s)
        if isinstance(policy, SaveEverySteps):  # each process counts the same steps
            return policy.is_due(moment)
        return done_by_first("CheckpointManager.save", lambda: policy.is_due(moment))

    def _entries(self) -> list[_Entry]:
        pattern = re.compile(rf"{re.escape(self._name)}-(\d+)({re.escape(_NEW)})?")
        found: dict[int, _Entry] = {}
        for path in sorted(self._folder.glob(f"{self._name}-*")):  # the new one after the old
            named = pattern.fullmatch(path.name)
            if named and is_whole(path):
                number = int(named[1])
                found[number] = _Entry(path, number, path.stat().st_mtime)
        return sorted(found.values(), key=lambda entry: entry.number)

    def _sweep(self) -> None:
        """Deletes what is not to be kept; the newest always is."""
        entries = self._entries()
        if self._keep is None or not entries:
            return
        keeps = self._keep.keeps([Kept(one.number, one.time_s) for one in entries])
        for entry in entries[:-1]:
            if entry.number not in keeps:
                _delete(entry.path)


@dataclasses.dataclass(frozen=True)
class _InSeries(Place):
    """A name that may be taken: what has it stays until the new one is whole."""

    sweep: Callable[[], None]

    def prepare(self) -> Path:
        _replace(self.folder)
        is_taken = self.folder.exists()
        return self.folder.with_name(self.folder.name + _NEW) if is_taken else self.folder

    def finish(self, folder: Path) -> None:
        if folder != self.folder:
            _replace(self.folder)
        self.sweep()


def _replace(folder: Path) -> None:
    """Puts a whole new checkpoint where an older one is; ends, too, what a killed process began."""
    new = folder.with_name(folder.name + _NEW)
    if is_whole(new):
        _delete(folder)
        new.rename(folder)


def _delete(folder: Path) -> None:
    """Deletes a checkpoint; while it goes on nobody takes it for a whole one."""
    (folder / COMMIT_MARK).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _keep_policy(
    max_to_keep: int | KeepPolicy | None, every_n_hours: float | None
) -> KeepPolicy | None:
    if max_to_keep is None:
        return None
    if isinstance(max_to_keep, KeepPolicy):
        latest: KeepPolicy = max_to_keep
    elif max_to_keep < 1:
        raise ValueError(
            explain(
                f"max_to_keep={max_to_keep!r} keeps no checkpoint.",
                expected="1 or more, a policy such as KeepLatest(3), or None for all.",
                fix="pass such a number.",
            )
        )
    else:
        latest = KeepLatest(max_to_keep)
    return latest if every_n_hours is None else AnyPolicy(latest, KeepEveryHours(every_n_hours))


def _save_policy(interval: int | SavePolicy | None, step_counter: Any) -> SavePolicy | None:
    if interval is None:
        return None
    if step_counter is None:
        raise ValueError(
            explain(
                f"checkpoint_interval={interval!r} has no steps to count.",
                expected="step_counter, a variable that counts the steps.",
                fix="pass step_counter=optimizer.iterations, or a variable of your own.",
            )
        )
    return interval if isinstance(interval, SavePolicy) else SaveEverySteps(interval)

"""Series of numbered checkpoints in one folder, with save intervals and retention."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.checkpoint.checkpoint import Checkpoint
from stratagem.checkpoint.latest import is_first, read_in_time, run_on_first
from stratagem.checkpoint.policies import Any as AnyPolicy
from stratagem.checkpoint.policies import (
    KeepEveryHours,
    KeepLatest,
    KeepPolicy,
    Moment,
    RetainedCheckpoint,
    SaveEverySteps,
    SavePolicy,
)
from stratagem.checkpoint.saving import CheckpointLocation, CheckpointOptions, TableSeries
from stratagem.checkpoint.storage.files import COMMIT_MARK, is_whole
from stratagem.checkpoint.storage.process import wait_for_writing
from stratagem.errors import DataLossError, check_number, invalid, raise_reported
from stratagem.resources import checked_folder

if TYPE_CHECKING:
    import keras


# Suffix of a checkpoint that will replace another one.
_NEW = ".new"
# A restore reads at most so many files of each table, and they are at most twice as large as it is.
_FULL_TABLES_EVERY = 10


class CheckpointManager:
    """Saves numbered checkpoints in a folder and deletes old ones.

    Args:
        checkpoint: objects to save.
        directory: folder of the checkpoints; with several machines, on a shared file system.
        max_to_keep: number of newest checkpoints to keep, or a policy; None keeps all.
        keep_checkpoint_every_n_hours: also keeps one checkpoint per this many hours.
        checkpoint_name: start of the checkpoint names.
        step_counter: variable that counts steps; its value numbers the checkpoints.
        checkpoint_interval: steps between saves, or a policy; needs `step_counter`.
        init_fn: called by `restore_or_initialize` if there is no checkpoint.
        last_checkpoint_step: step of the last save, for the interval, when training continues
            without a restore.
        full_tables_every: of so many checkpoints, one has all rows of keyed tables, and the others
            those that changed since the last one; 1 for all rows in each.

    Raises:
        ValueError: `directory` is empty, `max_to_keep` or `full_tables_every` is below 1, or an
            interval has no counter.

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
        step_counter: keras.Variable | None = None,
        checkpoint_interval: int | SavePolicy | None = None,
        init_fn: Callable[[], Any] | None = None,
        last_checkpoint_step: int = 0,
        *,
        full_tables_every: int = _FULL_TABLES_EVERY,
    ) -> None:
        self.checkpoint = checkpoint
        self._folder = Path(checked_folder("directory", directory)).absolute()
        self._name = checkpoint_name
        self._keep = _keep_policy(max_to_keep, keep_checkpoint_every_n_hours)
        self._counter = step_counter
        self._interval = _save_policy(checkpoint_interval, step_counter)
        self._init_fn = init_fn
        self._saved_step = last_checkpoint_step
        self._saved_time_s = time.monotonic()
        check_number("CheckpointManager", full_tables_every=full_tables_every)
        tables = self._folder / f"{checkpoint_name}-tables"
        self._tables = TableSeries(tables, full_tables_every)

    @property
    def directory(self) -> str:
        """Absolute path of the folder."""
        return str(self._folder)

    @property
    def checkpoint_interval(self) -> int | SavePolicy | None:
        """Number of steps between saves, or the policy that decides when to save."""
        policy = self._interval
        return policy.steps if isinstance(policy, SaveEverySteps) else policy

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the complete checkpoints of process 0, oldest first."""
        return run_on_first(
            "CheckpointManager.checkpoints",
            lambda: list(map(str, read_in_time(self._folder, self._paths).values())),
        )

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the newest complete checkpoint, or None if there is none."""
        return next(iter(reversed(self.checkpoints)), None)

    def save(
        self,
        checkpoint_number: int | None = None,
        check_interval: bool = True,
        options: CheckpointOptions | None = None,
    ) -> str | None:
        """Saves if due, and deletes checkpoints that are no longer needed. Call on every process.

        Args:
            checkpoint_number: None for the step, or for a number that counts up.
            check_interval: False saves even if the interval has not passed.
            options: how to write; None for the defaults.

        Returns:
            The path, or None if no save was due.

        Raises:
            OSError: writing failed; earlier checkpoints are unchanged.
        """
        raise_reported()
        step = None if self._counter is None else int(self._counter)
        if check_interval and step is not None and not self._is_due(step):
            return None
        number = step if checkpoint_number is None else int(checkpoint_number)
        if number is None:
            number = int(self.checkpoint.save_counter) + 1
        folder = self._folder / f"{self._name}-{number}"
        if not is_first():  # programs from TensorFlow's guides delete these folders afterwards
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True, exist_ok=True)
        if self._tables.last is None and is_first():
            names = [_name_of(path) for path in self._paths().values()]
            self._tables.last = names[-1] if names else None
        place = _NumberedLocation(folder, self._sweep, tables=self._tables)
        path = self.checkpoint.save_as(str(folder), options, place=place)
        self._saved_step, self._saved_time_s = step or 0, time.monotonic()
        return path

    def sync(self) -> None:
        """Waits for asynchronous writes to finish. Call on every process.

        Raises:
            OSError: a write failed, and no step has raised its error yet.
        """
        self.checkpoint.sync()

    def restore_or_initialize(self, *, skip_damaged: bool = False) -> str | None:
        """Restores the latest checkpoint, or calls `init_fn` without one. Call on every process.

        Args:
            skip_damaged: falls back to earlier checkpoints if the latest is damaged.

        Returns:
            Path of the restored checkpoint, or None if there was none.

        Raises:
            DataLossError: the latest checkpoint is damaged; with `skip_damaged`, all are.
            ValueError: the checkpoint holds other objects, or shapes differ.
        """
        run_on_first("CheckpointManager.restore_or_initialize", wait_for_writing)
        paths = self.checkpoints
        for path in reversed(paths):
            try:
                self.checkpoint.restore(path, CheckpointOptions(restore_components=True))
                if skip_damaged:  # pending values may be damaged, too
                    self.checkpoint.hold()
            except DataLossError:
                if not skip_damaged or path == paths[0]:
                    raise
                continue
            self._saved_step = 0 if self._counter is None else int(self._counter)
            self._saved_time_s = time.monotonic()
            self._tables.last = _name_of(Path(path))
            return path
        if self._init_fn is not None:
            self._init_fn()
        return None

    def _is_due(self, step: int) -> bool:
        policy = self._interval
        if policy is None:
            return True
        moment = Moment(step, time.monotonic(), self._saved_step, self._saved_time_s)
        if isinstance(policy, SaveEverySteps):  # all processes count the same steps
            return policy.is_due(moment)
        return run_on_first("CheckpointManager.save", lambda: policy.is_due(moment))

    def _paths(self) -> dict[int, Path]:
        """Returns the complete checkpoints by number, in order."""
        pattern = re.compile(rf"{re.escape(self._name)}-(\d+)({re.escape(_NEW)})?")
        found: dict[int, Path] = {}
        for path in sorted(self._folder.glob(f"{self._name}-*")):  # the new one after the old
            named = pattern.fullmatch(path.name)
            if named and is_whole(path):
                found[int(named[1])] = path
        return dict(sorted(found.items()))

    def _sweep(self) -> None:
        """Deletes checkpoints that the policy does not keep; the newest always stays."""
        paths = self._paths()
        if self._keep is None or not paths:
            return
        keeps = self._keep.keeps(
            [RetainedCheckpoint(number, path.stat().st_mtime) for number, path in paths.items()]
        )
        keeps.add(max(paths))
        for number, path in paths.items():
            if number not in keeps:
                _delete(path)
        self._tables.keep_for({_name_of(paths[number]) for number in paths.keys() & keeps})


def _name_of(path: Path) -> str:
    return path.name.removesuffix(_NEW)


@dataclasses.dataclass(frozen=True)
class _NumberedLocation(CheckpointLocation):
    """Location of a numbered checkpoint; replaces an older one of the same number."""

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
    """Replaces an older checkpoint by a complete new one, also after an interruption."""
    new = folder.with_name(folder.name + _NEW)
    if is_whole(new):
        _delete(folder)
        new.rename(folder)


def _delete(folder: Path) -> None:
    """Deletes a checkpoint; an interrupted deletion leaves no complete one."""
    (folder / COMMIT_MARK).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _keep_policy(
    max_to_keep: int | KeepPolicy | None, every_n_hours: float | None
) -> KeepPolicy | None:
    if max_to_keep is None:
        return None
    if isinstance(max_to_keep, KeepPolicy):
        latest: KeepPolicy = max_to_keep
    else:
        check_number("CheckpointManager", max_to_keep=max_to_keep)
        latest = KeepLatest(max_to_keep)
    return latest if every_n_hours is None else AnyPolicy(latest, KeepEveryHours(every_n_hours))


def _save_policy(interval: int | SavePolicy | None, step_counter: object) -> SavePolicy | None:
    if interval is None:
        return None
    if step_counter is None:
        raise invalid(
            f"checkpoint_interval={interval!r} was passed without a step_counter.",
            expected="step_counter, a variable that counts the steps.",
            fix="pass step_counter=optimizer.iterations, or your own variable.",
        )
    return interval if isinstance(interval, SavePolicy) else SaveEverySteps(interval)

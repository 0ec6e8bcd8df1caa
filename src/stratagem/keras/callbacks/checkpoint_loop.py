"""Loop that evaluates new checkpoints of a folder until a limit, notice or timeout."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import re
import shutil
import signal
import tempfile
import threading
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from stratagem import logs
from stratagem.errors import DeadlineExceededError, explain, invalid

if TYPE_CHECKING:
    import keras

# Keras checkpoint files: search in a folder, and loading into a model.
#
# Keras writes in place: a file appears before it is complete, and may be rewritten while it is
# read.
# HDF5 also locks files that it reads, which would block training. Hence a file is copied first, and
# loaded only if it did not change meanwhile.

# ".weights.h5" comes first because it also ends with ".h5".
_SUFFIXES = (".weights.h5", ".keras", ".h5")
# A separate integer, not the decimals of a number: "ckpt-0007", "07-0.35".
_EPOCH = re.compile(r"(?:^|[-_=]|(?<!\d)\.|epoch|ckpt)(\d+)(?=[-_]|$)")
# Errors of h5py and zipfile for an incomplete file.
_NOT_WHOLE = (OSError, EOFError, KeyError, zipfile.BadZipFile)


class UnreadableCheckpointError(Exception):
    """Raised for an incomplete checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointFile:
    """State of a checkpoint file; a rewritten file is another checkpoint.

    Example:
        >>> from stratagem.keras.callbacks.checkpoint_loop import CheckpointFile
        >>> CheckpointFile(path=Path("ckpt-0007.weights.h5"), modified_ns=0, size_bytes=0).epoch
        7
    """

    path: Path
    modified_ns: int
    size_bytes: int

    @property
    def name(self) -> str:
        """File name."""
        return self.path.name

    @property
    def epoch(self) -> int | None:
        """Last separate integer in the name; None if there is none."""
        ends = (end for end in _SUFFIXES if self.name.endswith(end))
        stem = self.name.removesuffix(next(ends, ""))
        numbers = _EPOCH.findall(stem)
        return int(numbers[-1]) if numbers else None

    @property
    def age(self) -> tuple[int, list[str | int]]:
        """Sort key: time, then the name with numbers by value."""
        parts = re.split(r"(\d+)", self.name)
        # Text and digits alternate, so that values of the same type are compared.
        return self.modified_ns, [
            int(part) if index % 2 else part for index, part in enumerate(parts)
        ]


@dataclasses.dataclass(frozen=True)
class KerasFiles:
    """Files written by `ModelCheckpoint`, `save_weights` and `save`."""

    names: str = " or ".join(f"*{suffix}" for suffix in _SUFFIXES[:2])

    def find(self, folder: Path) -> list[CheckpointFile]:
        """Returns the files with a checkpoint's suffix, oldest first."""
        found: list[CheckpointFile] = []
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    # Some programs put hidden files of the same name, after a dot, beside others.
                    is_hidden = entry.name.startswith(".")
                    if entry.name.endswith(_SUFFIXES) and not is_hidden and entry.is_file():
                        with contextlib.suppress(FileNotFoundError):
                            found.append(_checkpoint(folder / entry.name))
        except FileNotFoundError:
            return []
        return sorted(found, key=lambda one: one.age)

    def load(self, checkpoint: CheckpointFile, model: keras.Model) -> None:
        """Loads weights into a built model, and matching state into its optimizer.

        Raises:
            FileNotFoundError: the file was removed.
            UnreadableCheckpointError: the file is incomplete, or was rewritten.
            ValueError: it does not fit the model.
        """
        with tempfile.TemporaryDirectory(prefix="stratagem-") as folder:
            copy = Path(folder, checkpoint.name)
            try:
                shutil.copyfile(checkpoint.path, copy)
                if _checkpoint(checkpoint.path) != checkpoint:
                    raise UnreadableCheckpointError("it was written again while it was read")
                with warnings.catch_warnings():
                    # Evaluation needs no optimizer state, so the optimizer may differ.
                    warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
                    model.load_weights(copy)
            except FileNotFoundError:
                raise
            except _NOT_WHOLE as error:
                raise UnreadableCheckpointError(f"{type(error).__name__}: {error}") from error
            except ValueError as error:
                raise invalid(
                    f"{checkpoint.path} does not fit the model: {error}",
                    expected="weights of the evaluated model.",
                    fix="build the model as in training, or pass the folder of its checkpoints.",
                    code="SG703",
                ) from error


def _checkpoint(path: Path) -> CheckpointFile:
    status = path.stat()
    return CheckpointFile(path=path, modified_ns=status.st_mtime_ns, size_bytes=status.st_size)


# Record of a folder's checkpoints: new, complete, evaluated or unreadable.

# Limit on an unchanged, incomplete file. On a network file system, writes of another machine can
# take a minute to appear.
PATIENCE_S = 75.0


class CheckpointFollower:
    """Record of the checkpoints found in a folder, and of those already evaluated.

    It reads no files and no clock: callers pass the time `now_s`, in seconds of any clock.
    """

    def __init__(self, checkpoint_format: KerasFiles, folder: Path, now_s: float) -> None:
        self._format = checkpoint_format
        self._folder = folder
        self._found: Sequence[CheckpointFile] = ()
        self._done: dict[Path, CheckpointFile] = {}
        self._unreadable: dict[Path, tuple[CheckpointFile, float]] = {}
        self._times_done: Counter[Path] = Counter()
        self.changed_at_s = now_s

    @property
    def num_done(self) -> int:
        """Number of processed checkpoints.

        A name counts once, because restarted training rewrites files, unless all share one name:
        then each write counts.
        """
        return max(len(self._times_done), *self._times_done.values(), 0)

    def look(self, now_s: float, *, is_last: bool = False) -> list[CheckpointFile]:
        """Scans the folder; returns pending checkpoints unchanged since the last scan.

        They are sorted, oldest first. `is_last` means that writing has ended: unreadable ones are
        tried once more.
        """
        before, self._found = self._found, self._format.find(self._folder)
        if self._found != before:
            self.changed_at_s = now_s
        return [
            one
            for one in self._found
            if one in before
            and self._done.get(one.path) != one
            and (is_last or self._may_try(one, now_s))
        ]

    def finish(self, checkpoint: CheckpointFile) -> None:
        """Marks a checkpoint as evaluated or skipped."""
        self._done[checkpoint.path] = checkpoint
        self._times_done[checkpoint.path] += 1

    def postpone(self, checkpoint: CheckpointFile, now_s: float) -> bool:
        """Skips an unreadable checkpoint until it changes; returns False once patience runs out."""
        known = self._unreadable.get(checkpoint.path)
        if known is None or known[0] != checkpoint:
            self._unreadable[checkpoint.path] = checkpoint, now_s
            return True
        return now_s - known[1] < PATIENCE_S

    def has_newer(self, checkpoint: CheckpointFile) -> bool:
        """Returns True if another checkpoint, complete or not, is newer."""
        return any(one.age > checkpoint.age for one in self._found if one.path != checkpoint.path)

    def _may_try(self, checkpoint: CheckpointFile, now_s: float) -> bool:
        known = self._unreadable.get(checkpoint.path)
        return known is None or known[0] != checkpoint or now_s - known[1] >= PATIENCE_S


# SIGTERM as a notice to finish the current work.


class StopNotice:
    """Treats the first SIGTERM as a stop notice; a second one ends the process, as usual.

    Python allows handlers only in the main thread. In other threads, and if the program handles or
    ignores the signal itself, nothing changes and no notice arrives.

    Example:
        >>> import signal
        >>> from stratagem.keras.callbacks.checkpoint_loop import StopNotice
        >>> with StopNotice() as notice:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     notice.is_given
        True
    """

    def __init__(self) -> None:
        # A signal handler interrupts wait(): SimpleQueue.put is reentrant, Event.set is not.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_taken = False
        self.is_given = False

    def __enter__(self) -> StopNotice:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._take)
            self._is_taken = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_taken:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wait(self, seconds: float) -> None:
        """Waits for the notice, at most `seconds`."""
        try:
            self._woken.get(timeout=seconds)
        except queue.Empty:
            return

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.is_given = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._woken.put(None)


_logger = logging.getLogger(__name__)

# Time without any checkpoint before a line reports the folder.
_FIRST_NEWS_S = 30.0
# Limit on the pause between the two last scans: a launcher kills soon after SIGTERM.
_LAST_PAUSE_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopLimits:
    """Selection of checkpoints, and time limits of the loop.

    `every` takes all in order; otherwise the loop skips to the newest. `max_checkpoints` includes
    the skipped ones; None is no limit. `timeout_s` limits the time without a change in the folder.
    """

    every: bool
    max_checkpoints: int | None
    timeout_s: float
    poll_s: float


class CheckpointLoop:
    """One run through the checkpoints of a folder.

    For each, `load` updates the model and raises like `KerasFiles.load`; then `evaluate`
    runs.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint_format: KerasFiles,
        *,
        load: Callable[[CheckpointFile], None],
        evaluate: Callable[[CheckpointFile], None],
        limits: LoopLimits,
    ) -> None:
        self._folder = folder
        self._names = checkpoint_format.names
        self._follower = CheckpointFollower(checkpoint_format, folder, time.monotonic())
        self._load = load
        self._evaluate = evaluate
        self._limits = limits
        self._last: CheckpointFile | None = None
        self._ended_at_s = time.monotonic()
        self._has_news = False

    def run(self, notice: StopNotice) -> None:
        """Evaluates checkpoints until the limit is reached or the stop notice arrives.

        Raises:
            DeadlineExceededError: the folder did not change in time.
            ValueError: a checkpoint does not fit the model.
            RuntimeError: the newest checkpoint is incomplete and no longer being written.
        """
        while not self._take_new(is_last=False):
            if notice.is_given:
                self._finish()
                return
            waited_s = self._waited_s()
            if waited_s >= self._limits.timeout_s:
                if self._finish():
                    return
                if self._waited_s() >= self._limits.timeout_s:
                    raise self._too_late(waited_s)
            self._report_news(waited_s)
            notice.wait(self._limits.poll_s)

    def _take_new(self, *, is_last: bool) -> bool:
        """Evaluates new checkpoints; returns True once the limit is reached."""
        new = self._follower.look(time.monotonic(), is_last=is_last)
        turns = list(enumerate(new))
        for index, checkpoint in turns if self._limits.every else reversed(turns):
            if not self._take(checkpoint, is_last=is_last):
                continue
            if not self._limits.every:
                for older in new[:index]:
                    self._follower.finish(older)
            if self._is_enough():
                return True
            if not self._limits.every:
                return False
        return False

    def _take(self, checkpoint: CheckpointFile, *, is_last: bool) -> bool:
        try:
            self._load(checkpoint)
        except FileNotFoundError:
            _say(f"skipped {checkpoint.path}, which was deleted before it could be read.")
            self._follower.finish(checkpoint)
            return False
        except UnreadableCheckpointError as error:
            self._leave(checkpoint, error, is_last=is_last)
            return False
        self._evaluate(checkpoint)
        self._follower.finish(checkpoint)
        self._last, self._ended_at_s = checkpoint, time.monotonic()
        return True

    def _leave(
        self, checkpoint: CheckpointFile, error: UnreadableCheckpointError, *, is_last: bool
    ) -> None:
        if self._follower.has_newer(checkpoint):
            _say(f"skipped {checkpoint.path}, which is incomplete ({error}): a newer one exists.")
            self._follower.finish(checkpoint)
            return
        waits = self._follower.postpone(checkpoint, time.monotonic())
        if is_last or not waits:
            raise RuntimeError(
                explain(
                    f"{checkpoint.path} cannot be read: {error}.",
                    expected="a complete file.",
                    fix="find out why the write did not finish, then remove the file.",
                )
            ) from error

    def _finish(self) -> bool:
        """Evaluates the remaining checkpoints; two scans suffice, since writing has ended."""
        self._follower.look(time.monotonic())
        time.sleep(min(self._limits.poll_s, _LAST_PAUSE_S))
        return self._take_new(is_last=True)

    def _is_enough(self) -> bool:
        most = self._limits.max_checkpoints
        return most is not None and self._follower.num_done >= most

    def _waited_s(self) -> float:
        return time.monotonic() - max(self._follower.changed_at_s, self._ended_at_s)

    def _report_news(self, waited_s: float) -> None:
        if self._last is None and waited_s >= _FIRST_NEWS_S and not self._has_news:
            self._has_news = True
            _say(f"found no {self._names} in {self._folder} after {waited_s:.0f} s.")

    def _too_late(self, waited_s: float) -> DeadlineExceededError:
        last = "none so far" if self._last is None else f"the last was {self._last.name}"
        return DeadlineExceededError(
            explain(
                f"No new checkpoint appeared in {self._folder} for {waited_s:.0f} s; {last}.",
                expected=f"the next {self._names} within {self._limits.timeout_s:g} s.",
                fix="check that training runs and writes to this folder; or set max_evaluations to "
                "stop earlier; or raise timeout_s or STRATAGEM_CHECKPOINT_TIMEOUT_S.",
                code="SG709",
            )
        )


def _say(text: str) -> None:
    logs.announce(_logger, f"SidecarEvaluator: {text}")

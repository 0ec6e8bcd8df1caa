"""Loop that evaluates new checkpoints of a folder until a limit, notice or timeout."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path

from stratagem import logs
from stratagem.errors import DeadlineExceededError
from stratagem.keras.evaluation.checkpoint_files import (
    CheckpointFile,
    CheckpointFormat,
    UnreadableCheckpointError,
)
from stratagem.keras.evaluation.checkpoint_follower import CheckpointFollower
from stratagem.keras.evaluation.stop_notice import StopNotice
from stratagem.messages import explain

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

    For each, `load` updates the model and raises like `CheckpointFormat.load`; then `evaluate`
    runs.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint_format: CheckpointFormat,
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

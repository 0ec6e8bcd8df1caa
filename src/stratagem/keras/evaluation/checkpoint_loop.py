"""Takes each new checkpoint of a folder in its turn, until there is reason to end."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path

from stratagem.errors import DeadlineExceededError
from stratagem.keras.evaluation.checkpoint_files import (
    Checkpoint,
    CheckpointFormat,
    UnreadableCheckpointError,
)
from stratagem.keras.evaluation.checkpoint_follower import CheckpointFollower
from stratagem.keras.evaluation.stop_notice import StopNotice
from stratagem.messages import explain

__all__ = ["CheckpointLoop", "LoopLimits"]

# After this long without any checkpoint a line says where they are expected.
_FIRST_NEWS_S = 30.0
# Between the two last looks at the end: whoever sent SIGTERM does not wait for long.
_LAST_PAUSE_S = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopLimits:
    """Loop over the checkpoints of a folder until it ends or times out.

    Args:
        every: all in order; otherwise of several the newest alone.
        max_checkpoints: how many to take or pass over; None for no limit.
        timeout_s: how long the folder may stay as it is.
        poll_s: how long between two looks.
    """

    every: bool
    max_checkpoints: int | None
    timeout_s: float
    poll_s: float


class CheckpointLoop:
    """One run through the checkpoints of a folder.

    Args:
        folder: where they appear.
        checkpoint_format: finds and loads them.
        load: makes one the model's; raises as `CheckpointFormat.load` does.
        evaluate: uses the one that was loaded.
        limits: which are taken, and for how long.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint_format: CheckpointFormat,
        *,
        load: Callable[[Checkpoint], None],
        evaluate: Callable[[Checkpoint], None],
        limits: LoopLimits,
    ) -> None:
        self._folder = folder
        self._names = checkpoint_format.names
        self._follower = CheckpointFollower(checkpoint_format, folder, time.monotonic())
        self._load = load
        self._evaluate = evaluate
        self._limits = limits
        self._last: Checkpoint | None = None
        self._ended_at_s = time.monotonic()
        self._has_news = False

    def run(self, notice: StopNotice) -> None:
        """Goes on until the limit is reached, the notice comes, or no checkpoint does.

        Args:
            notice: of the end of training.

        Raises:
            DeadlineExceededError: the folder stayed as it was for too long.
            ValueError: a checkpoint does not fit the model.
            RuntimeError: the newest is not whole, and is not written any more.
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
            self._tell_news(waited_s)
            notice.wait(self._limits.poll_s)

    def _take_new(self, *, is_last: bool) -> bool:
        """Takes what is new, and returns whether that was all that was asked for."""
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

    def _take(self, checkpoint: Checkpoint, *, is_last: bool) -> bool:
        try:
            self._load(checkpoint)
        except FileNotFoundError:
            _say(f"{checkpoint.path} was removed before it was read.")
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
        self, checkpoint: Checkpoint, error: UnreadableCheckpointError, *, is_last: bool
    ) -> None:
        if self._follower.has_newer(checkpoint):
            _say(f"{checkpoint.path} is not whole ({error}): a newer one takes its place.")
            self._follower.finish(checkpoint)
            return
        waits = self._follower.postpone(checkpoint, time.monotonic())
        if is_last or not waits:
            raise RuntimeError(
                explain(
                    f"{checkpoint.path} cannot be read: {error}.",
                    expected="a file that is written to its end.",
                    fix="see why whoever wrote it did not finish, and remove it.",
                )
            ) from error

    def _finish(self) -> bool:
        """Takes what was written until now; nobody writes any more, so two looks are enough."""
        self._follower.look(time.monotonic())
        time.sleep(min(self._limits.poll_s, _LAST_PAUSE_S))
        return self._take_new(is_last=True)

    def _is_enough(self) -> bool:
        most = self._limits.max_checkpoints
        return most is not None and self._follower.num_done >= most

    def _waited_s(self) -> float:
        return time.monotonic() - max(self._follower.changed_at_s, self._ended_at_s)

    def _tell_news(self, waited_s: float) -> None:
        if self._last is None and waited_s >= _FIRST_NEWS_S and not self._has_news:
            self._has_news = True
            _say(f"no {self._names} in {self._folder} for {waited_s:.0f} s.")

    def _too_late(self, waited_s: float) -> DeadlineExceededError:
        last = "none so far" if self._last is None else f"the last was {self._last.name}"
        return DeadlineExceededError(
            explain(
                f"No new checkpoint came into {self._folder} for {waited_s:.0f} s; {last}.",
                expected=f"the next {self._names} within {self._limits.timeout_s:g} s.",
                fix="see whether training runs and writes there; end with max_evaluations; or "
                "raise timeout_s or STRATAGEM_CHECKPOINT_TIMEOUT_S.",
            )
        )


def _say(text: str) -> None:
    print(f"SidecarEvaluator: {text}", file=sys.stderr, flush=True)

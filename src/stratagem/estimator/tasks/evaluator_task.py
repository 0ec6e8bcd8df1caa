"""The evaluator of a cluster: it follows the checkpoints of a training that runs elsewhere."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from stratagem import config
from stratagem.errors import DeadlineExceededError
from stratagem.estimator.estimator_protocol import EstimatorProtocol
from stratagem.estimator.hooks.timers import Clock
from stratagem.estimator.tasks.checkpoint_evaluation import (
    CheckpointEvaluation,
    CheckpointEvaluator,
)
from stratagem.estimator.tasks.train_spec import EvalSpec, TrainSpec
from stratagem.keras.stop_notice import StopNotice
from stratagem.messages import explain

__all__ = ["EvaluatorLoop", "Notice", "run_evaluator"]

_logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
# How long after a checkpoint, or the last line, a line says what is waited for.
_NEWS_EVERY_S = 600.0
_FIRST_NEWS_S = 30.0


class Notice(Protocol):
    """The notice that training is over, as SIGTERM gives it."""

    is_given: bool

    def wait(self, seconds: float) -> None:
        """Waits for it, for so long at most."""
        ...


def run_evaluator(
    estimator: EstimatorProtocol,
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    *,
    timeout_s: float | None = None,
) -> CheckpointEvaluation | None:
    """Evaluates and exports each new checkpoint, until one has reached `max_steps`.

    SIGTERM, by which launchers end an evaluator when training is over, ends it in order: it
    finishes what it evaluates, takes the newest checkpoint, and returns.

    Args:
        estimator: the Estimator, with the folder that the training has.
        train_spec: of the training; tells its end.
        eval_spec: how to evaluate.
        timeout_s: how long to wait for the next checkpoint; None for
            `STRATAGEM_CHECKPOINT_TIMEOUT_S`.

    Returns:
        The last evaluation; None if there was none.

    Raises:
        DeadlineExceededError: no checkpoint came in time.

    Source: tensorflow/estimator training.py, _start_continuous_evaluation.
    """
    limit_s = config.checkpoint_timeout_s() if timeout_s is None else timeout_s
    evaluator = CheckpointEvaluator(estimator, eval_spec, train_spec.max_steps)
    with StopNotice() as notice:
        return EvaluatorLoop(
            evaluator, estimator.model_dir, eval_spec, timeout_s=limit_s, notice=notice
        ).run()


class EvaluatorLoop:
    """One run of an evaluator.

    Args:
        evaluator: evaluates checkpoints.
        model_dir: where they appear, for messages.
        eval_spec: when.
        timeout_s: how long to wait for the next.
        notice: of the end of training.
        clock: tells the time in seconds.
    """

    def __init__(
        self,
        evaluator: CheckpointEvaluator,
        model_dir: str,
        eval_spec: EvalSpec,
        *,
        timeout_s: float,
        notice: Notice,
        clock: Clock = time.monotonic,
    ) -> None:
        self._evaluator = evaluator
        self._model_dir = model_dir
        self._spec = eval_spec
        self._timeout_s = timeout_s
        self._notice = notice
        self._clock = clock
        self._last: CheckpointEvaluation | None = None

    def run(self) -> CheckpointEvaluation | None:
        """Evaluates until the end of training.

        Returns:
            The last evaluation.

        Raises:
            DeadlineExceededError: no checkpoint came in time.
        """
        self._pause(self._spec.start_delay_secs)
        while True:
            is_over = self._notice.is_given  # asked first: nothing is written after it
            path = self._wait_for_checkpoint() if not is_over else self._evaluator.find_new()
            started_at_s = self._clock()
            if path is not None:
                self._last = self._evaluator.evaluate_unless_removed(path) or self._last
            if is_over or (self._last is not None and self._last.is_final):
                return self._last
            self._pause(self._spec.throttle_secs - (self._clock() - started_at_s))

    def _wait_for_checkpoint(self) -> str | None:
        """The next checkpoint; None where the notice comes first."""
        began_s, told_at_s = self._clock(), self._clock() - _NEWS_EVERY_S + _FIRST_NEWS_S
        while not self._notice.is_given:
            path = self._evaluator.find_new()
            if path is not None:
                return path
            now_s = self._clock()
            if now_s - began_s >= self._timeout_s:
                raise self._too_late(now_s - began_s)
            if now_s - told_at_s >= _NEWS_EVERY_S:
                told_at_s = now_s
                _logger.warning(
                    "No new checkpoint in %s for %.0f s; waiting for %g s at most.",
                    self._model_dir,
                    now_s - began_s,
                    self._timeout_s,
                )
            self._notice.wait(min(_LOOK_EVERY_S, began_s + self._timeout_s - now_s))
        return None

    def _pause(self, seconds: float) -> None:
        until_s = self._clock() + seconds
        while not self._notice.is_given and self._clock() < until_s:
            self._notice.wait(until_s - self._clock())

    def _too_late(self, waited_s: float) -> DeadlineExceededError:
        last = "none so far" if self._last is None else f"the last was {self._last.checkpoint_path}"
        return DeadlineExceededError(
            explain(
                f"The evaluator got no new checkpoint in {self._model_dir} for {waited_s:.0f} s; "
                f"{last}.",
                expected=f"the next within {self._timeout_s:g} s, until max_steps is reached.",
                fix="see whether training runs, and writes into the same folder; pass max_steps "
                "in TrainSpec; or raise STRATAGEM_CHECKPOINT_TIMEOUT_S.",
            )
        )

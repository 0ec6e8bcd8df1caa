"""Evaluator task: evaluates checkpoints of a training run in other processes."""

from __future__ import annotations

import dataclasses
import logging
import time

from stratagem import config
from stratagem.errors import DeadlineExceededError
from stratagem.estimator.estimator_protocol import EstimatorProtocol
from stratagem.estimator.hooks.timers import Clock
from stratagem.estimator.tasks.checkpoint_evaluation import (
    CheckpointEvaluation,
    CheckpointEvaluator,
)
from stratagem.estimator.tasks.train_spec import EvalSpec, TrainSpec
from stratagem.keras.evaluation.stop_notice import StopNotice
from stratagem.messages import explain

_logger = logging.getLogger(__name__)

_POLL_EVERY_S = 1.0
# Time between log lines during a wait; the first one comes early.
_LOG_EVERY_S = 600.0
_FIRST_LOG_S = 30.0


def run_evaluator(
    estimator: EstimatorProtocol,
    train_spec: TrainSpec,
    eval_spec: EvalSpec,
    *,
    timeout_s: float | None = None,
) -> CheckpointEvaluation | None:
    """Evaluates and exports each new checkpoint until one reaches `max_steps`.

    Launchers send SIGTERM to the evaluator when training ends. It then finishes the current
    evaluation, evaluates the newest checkpoint and returns. Returns the last evaluation, or None.
    `timeout_s` limits the wait for each checkpoint; None for `STRATAGEM_CHECKPOINT_TIMEOUT_S`.

    Source: tensorflow/estimator training.py, _start_continuous_evaluation.
    """
    limit_s = config.checkpoint_timeout_s() if timeout_s is None else timeout_s
    evaluator = CheckpointEvaluator(estimator, eval_spec, train_spec.max_steps)
    with StopNotice() as stop_signal:
        return EvaluatorLoop(
            evaluator, estimator.model_dir, eval_spec, timeout_s=limit_s, stop_signal=stop_signal
        ).run()


@dataclasses.dataclass
class EvaluatorLoop:
    """Loop that waits for checkpoints and evaluates them."""

    evaluator: CheckpointEvaluator
    model_dir: str
    eval_spec: EvalSpec
    _: dataclasses.KW_ONLY
    timeout_s: float
    stop_signal: StopNotice
    clock: Clock = time.monotonic
    _last: CheckpointEvaluation | None = dataclasses.field(default=None, init=False)

    def run(self) -> CheckpointEvaluation | None:
        """Evaluates until training ends; returns the last evaluation, or None."""
        self._pause(self.eval_spec.start_delay_secs)
        while True:
            # Read first: no checkpoint is written after the signal.
            is_over = self.stop_signal.is_given
            path = self._wait_for_checkpoint() if not is_over else self.evaluator.find_new()
            started_at_s = self.clock()
            if path is not None:
                self._last = self.evaluator.evaluate_unless_removed(path) or self._last
            if is_over or (self._last is not None and self._last.is_final):
                return self._last
            self._pause(self.eval_spec.throttle_secs - (self.clock() - started_at_s))

    def _wait_for_checkpoint(self) -> str | None:
        """Returns the next checkpoint, or None if the stop signal arrives first."""
        began_s, logged_at_s = self.clock(), self.clock() - _LOG_EVERY_S + _FIRST_LOG_S
        while not self.stop_signal.is_given:
            path = self.evaluator.find_new()
            if path is not None:
                return path
            now_s = self.clock()
            if now_s - began_s >= self.timeout_s:
                raise self._timeout_error(now_s - began_s)
            if now_s - logged_at_s >= _LOG_EVERY_S:
                logged_at_s = now_s
                _logger.warning(
                    "No new checkpoint in %s for %.0f s; waiting up to %g s.",
                    self.model_dir,
                    now_s - began_s,
                    self.timeout_s,
                )
            self.stop_signal.wait(min(_POLL_EVERY_S, began_s + self.timeout_s - now_s))
        return None

    def _pause(self, seconds: float) -> None:
        until_s = self.clock() + seconds
        while not self.stop_signal.is_given and self.clock() < until_s:
            self.stop_signal.wait(until_s - self.clock())

    def _timeout_error(self, waited_s: float) -> DeadlineExceededError:
        last = "none" if self._last is None else self._last.checkpoint_path
        return DeadlineExceededError(
            explain(
                f"The evaluator found no new checkpoint in {self.model_dir} for {waited_s:.0f} s "
                f"(last evaluated: {last}).",
                expected=f"a new one every {self.timeout_s:g} s until max_steps is reached.",
                fix="check that training runs and writes to the same folder; pass max_steps "
                "in TrainSpec; or raise STRATAGEM_CHECKPOINT_TIMEOUT_S.",
                code="SG709",
            )
        )

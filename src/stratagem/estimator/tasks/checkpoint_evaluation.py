"""Evaluation and export of new checkpoints."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.devices.collectives import host
from stratagem.estimator.estimator_protocol import EstimatorProtocol
from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverListener
from stratagem.estimator.hooks.session_run_hook import Session
from stratagem.estimator.hooks.timers import Clock, SecondOrStepTimer
from stratagem.estimator.tasks.train_spec import EvalSpec
from stratagem.messages import explain

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation:
    """Metrics and exports of one evaluated checkpoint."""

    checkpoint_path: str
    metrics: Mapping[str, Any]
    exports: Sequence[str | None]
    is_final: bool


@dataclasses.dataclass
class CheckpointEvaluator:
    """Evaluates and exports each checkpoint once; `max_steps` of None means no limit."""

    estimator: EstimatorProtocol
    eval_spec: EvalSpec
    max_steps: int | None
    _done: str | None = dataclasses.field(default=None, init=False)

    def find_new(self) -> str | None:
        """Returns the latest checkpoint if it has not been evaluated yet, else None."""
        path = self.estimator.latest_checkpoint()
        return None if path == self._done else path

    def evaluate(self, checkpoint_path: str) -> CheckpointEvaluation:
        """Evaluates a checkpoint and runs the exporters."""
        metrics = self.estimator.evaluate(
            self.eval_spec.input_fn,
            steps=self.eval_spec.steps,
            hooks=list(self.eval_spec.hooks or ()),
            checkpoint_path=checkpoint_path,
            name=self.eval_spec.name,
        )
        is_final = self.max_steps is not None and metrics["global_step"] >= self.max_steps
        exporters: Any = self.eval_spec.exporters
        exports = [
            exporter.export(
                estimator=self.estimator,
                export_path=os.path.join(self.estimator.model_dir, "export", exporter.name),
                checkpoint_path=checkpoint_path,
                eval_result=metrics,
                is_the_final_export=is_final,
            )
            for exporter in exporters
        ]
        self._done = checkpoint_path
        return CheckpointEvaluation(
            checkpoint_path=checkpoint_path, metrics=metrics, exports=exports, is_final=is_final
        )

    def evaluate_unless_removed(self, checkpoint_path: str) -> CheckpointEvaluation | None:
        """Like `evaluate`, but returns None if training removed the checkpoint first."""
        try:
            return self.evaluate(checkpoint_path)
        except (OSError, LookupError, ValueError):
            if Path(checkpoint_path).exists():
                raise
            _logger.warning("%s was removed before it was evaluated.", checkpoint_path)
            self._done = checkpoint_path
            return None


class EvaluationListener(CheckpointSaverListener):
    """Evaluates checkpoints in the training process, at most once per `throttle_secs`."""

    def __init__(
        self,
        evaluator: CheckpointEvaluator,
        throttle_secs: float,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._evaluator = evaluator
        self._timer = SecondOrStepTimer(every_secs=throttle_secs, clock=clock)
        self._is_first = True
        self.last: CheckpointEvaluation | None = None

    def begin(self) -> None:
        """Resets the timer."""
        self._timer.reset()
        self._is_first = True

    def after_save(self, session: Session, global_step_value: int) -> None:
        """Evaluates the checkpoint if the interval has passed."""
        if self._is_first:  # saved before the first step
            self._is_first = False
        elif self._is_due(global_step_value):
            self._evaluate(global_step_value)
        else:
            _logger.info(
                "Skipping evaluation of the checkpoint of step %d: too soon.", global_step_value
            )

    def end(self, session: Session, global_step_value: int) -> None:
        """Evaluates the last checkpoint unless already done."""
        if global_step_value != self._timer.last_triggered_step():
            self._evaluate(global_step_value)

    def _is_due(self, step: int) -> bool:
        """Returns the first process's decision, since all processes evaluate together."""
        is_due = self._timer.should_trigger_for_step(step)
        return host.broadcast_object(is_due, name="whether to evaluate the checkpoint")

    def _evaluate(self, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        path = self._evaluator.find_new()
        if path is None:
            raise RuntimeError(
                explain(
                    f"The checkpoint of step {step} is missing.",
                    expected="the checkpoint just saved in the Estimator's folder.",
                    fix="check whether another program removes checkpoints from the folder.",
                )
            )
        self.last = self._evaluator.evaluate(path)

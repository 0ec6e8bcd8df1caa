"""The evaluation of new checkpoints, and the exports that follow from it."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stratagem.collectives import host
from stratagem.estimator.estimator_protocol import EstimatorProtocol
from stratagem.estimator.hooks import CheckpointSaverListener, SecondOrStepTimer, Session
from stratagem.estimator.hooks.timers import Clock
from stratagem.estimator.tasks.train_spec import EvalSpec
from stratagem.messages import explain

__all__ = ["CheckpointEvaluation", "CheckpointEvaluator", "EvaluationListener"]

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointEvaluation:
    """What the evaluation of a checkpoint gave.

    Args:
        checkpoint_path: the checkpoint.
        metrics: what `Estimator.evaluate` returned.
        exports: what each exporter returned.
        is_final: whether `max_steps` was reached.
    """

    checkpoint_path: str
    metrics: Mapping[str, Any]
    exports: Sequence[str | None]
    is_final: bool


class CheckpointEvaluator:
    """Evaluates and exports checkpoints, each once.

    Args:
        estimator: the Estimator.
        eval_spec: how.
        max_steps: the global step at which training ends; None for no such end.
    """

    def __init__(
        self, estimator: EstimatorProtocol, eval_spec: EvalSpec, max_steps: int | None
    ) -> None:
        self._estimator = estimator
        self._spec = eval_spec
        self._max_steps = max_steps
        self._done: str | None = None

    def find_new(self) -> str | None:
        """Returns the latest checkpoint, if it has not been evaluated; else None."""
        path = self._estimator.latest_checkpoint()
        return None if path == self._done else path

    def evaluate(self, checkpoint_path: str) -> CheckpointEvaluation:
        """Evaluates a checkpoint, and lets the exporters export it.

        Args:
            checkpoint_path: the checkpoint.

        Returns:
            What that gave.
        """
        metrics = self._estimator.evaluate(
            self._spec.input_fn,
            steps=self._spec.steps,
            hooks=list(self._spec.hooks or ()),
            checkpoint_path=checkpoint_path,
            name=self._spec.name,
        )
        is_final = self._max_steps is not None and metrics["global_step"] >= self._max_steps
        exporters: Any = self._spec.exporters
        exports = [
            exporter.export(
                estimator=self._estimator,
                export_path=os.path.join(self._estimator.model_dir, "export", exporter.name),
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
        """As `evaluate`, where training goes on and removes old checkpoints.

        Args:
            checkpoint_path: the checkpoint.

        Returns:
            What evaluation gave; None where the checkpoint was removed before it was read.
        """
        try:
            return self.evaluate(checkpoint_path)
        except (OSError, LookupError, ValueError):
            if Path(checkpoint_path).exists():
                raise
            _logger.warning("%s was removed before it was evaluated.", checkpoint_path)
            self._done = checkpoint_path
            return None


class EvaluationListener(CheckpointSaverListener):
    """Evaluates the checkpoints of a training in the same process, not more often than asked.

    Args:
        evaluator: evaluates them.
        throttle_secs: how long to wait, from the start of one evaluation, before the next.
        clock: tells the time in seconds.
    """

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
        """Begins anew."""
        self._timer.reset()
        self._is_first = True

    def after_save(self, session: Session, global_step_value: int) -> None:
        """Evaluates the checkpoint, if it is time.

        Args:
            session: not used.
            global_step_value: the global step.
        """
        if self._is_first:  # saved before the first step
            self._is_first = False
        elif self._is_due(global_step_value):
            self._evaluate(global_step_value)
        else:
            _logger.info(
                "The checkpoint of step %d comes too soon to be evaluated.", global_step_value
            )

    def end(self, session: Session, global_step_value: int) -> None:
        """Evaluates the last checkpoint, if it has not been.

        Args:
            session: not used.
            global_step_value: the global step.
        """
        if global_step_value != self._timer.last_triggered_step():
            self._evaluate(global_step_value)

    def _is_due(self, step: int) -> bool:
        """The same on all processes, which evaluate together: by the clock of the first."""
        own = self._timer.should_trigger_for_step(step)
        return host.broadcast_object(own, name="whether to evaluate the checkpoint")

    def _evaluate(self, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        path = self._evaluator.find_new()
        if path is None:
            raise RuntimeError(
                explain(
                    f"There is no new checkpoint after step {step}.",
                    expected="one in the folder of the Estimator, saved just now.",
                    fix="see whether something else removes checkpoints from it.",
                )
            )
        self.last = self._evaluator.evaluate(path)

"""Evaluation of an Estimator: metrics over a dataset, with the numbers of one device."""

from __future__ import annotations

from typing import Any

import keras

from stratagem.context import get_replica_context
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.steps.model_step import ModelStep, reported
from stratagem.keras.metric_logs import MetricLogs
from stratagem.keras.step_mode import StepMode, record_loss, step_mode
from stratagem.messages import explain

__all__ = ["EvaluationStep"]


class EvaluationStep(ModelStep):
    """Evaluates: the model function updates its metrics on each replica, and the loss is averaged.

    The loss is the average over all true examples, whatever the sizes of batches are.
    """

    mode = ModeKeys.EVAL

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._metrics: dict[str, keras.metrics.Metric] = {}
        self._logs = MetricLogs(self, self.strategy)

    def step(self, features: Any, labels: Any) -> Any:
        """Updates the metrics, and returns what hooks may fetch."""
        with step_mode(StepMode.MEAN):
            call = self.call(features, labels, _record_loss)
            metrics = dict(call.spec.eval_metric_ops or {})
            if "loss" in metrics:
                raise _taken_name()
            self._metrics = {**metrics, "loss": call.extra}
            return reported(call.values)

    def reset(self) -> None:
        """Lets all metrics begin anew. Call when the step is prepared."""
        with self.strategy.scope():
            for metric in self._metrics.values():
                metric.reset_state()

    def results(self) -> dict[str, Any]:
        """Returns the metrics over all replicas, as they are now."""
        return self._logs.so_far()

    # What `MetricLogs` asks a model for.

    @property
    def metrics_variables(self) -> list[Any]:
        """The variables of all metrics."""
        return [variable for metric in self._metrics.values() for variable in metric.variables]

    def get_metrics_result(self) -> dict[str, Any]:
        """The results of all metrics; those of a metric that has several under their names."""
        results: dict[str, Any] = {}
        for name, metric in self._metrics.items():
            result = metric.result()
            results |= result if isinstance(result, dict) else {name: result}
        return results


def _record_loss(spec: EstimatorSpec) -> keras.metrics.Mean:
    tracker = keras.metrics.Mean(name="loss")
    context = get_replica_context()
    assert context is not None
    if context.num_examples is None:
        tracker.update_state(spec.loss)
    else:
        record_loss(tracker, spec.loss, context)
    return tracker


def _taken_name() -> ValueError:
    return ValueError(
        explain(
            'eval_metric_ops has a metric of the name "loss".',
            expected="other names: the average of the spec's loss has this one.",
            fix="rename the metric.",
        )
    )
